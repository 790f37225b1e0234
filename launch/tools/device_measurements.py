"""Measures the devices of this machine: products, memory, passes of language models, generation, all-reduce."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.placement.estimates.model_shape import FLOAT, ModelShape
from rl_platform.planner.cost import BACKWARD, arithmetic, elementwise
from rl_platform.planner.rates import Measured, Rates, matrix_of
from rl_platform.records import RolloutBatch, SamplingParams, Weights

WIDTHS, ROWS = (64, 128, 256, 512, 1024), (1, 16, 256, 2048)
LEAST_S, MOST_S = 0.002, 0.3  # seconds of one round, which repeats short calls; seconds of all rounds
BATCHES, DECODED = (1, 8, 32), 32
STREAM_BYTES = 2**28
EXCHANGED = (2**12, 2**20, 2**24)  # bytes of an all-reduce
SMALL = ModelShape(512, 64, 8, 4, 4, 16, 128, tied=True)  # its operators take longer than their arithmetic
USUAL = ModelShape(8192, 576, 4, 9, 3, 64, 1536, tied=True)


def seconds_of(work: Callable[[], object], device: torch.device, least: float = LEAST_S) -> float:
    """Returns the seconds of one call: the median of rounds of at least `least` seconds, after a warm-up call."""

    def round_of(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    first, began = round_of(1), time.perf_counter()
    calls = max(1, round(least / max(first, 1e-7)))
    rounds: list[float] = []
    while not rounds or time.perf_counter() - began < MOST_S:
        rounds.append(round_of(calls))
    return statistics.median(rounds)


def matrix_rates(dtype: torch.dtype, device: torch.device) -> dict[str, list[tuple[int, float]]]:
    """Returns width -> (rows, FLOP/s) of products with a matrix [width, 4 * width]."""
    rates = {}
    for width in WIDTHS:
        matrix, points = torch.ones(width, 4 * width, dtype=dtype, device=device), []
        for rows in ROWS:
            left = torch.ones(rows, width, dtype=dtype, device=device)
            seconds = seconds_of(partial(torch.matmul, left, matrix), device)
            points.append((rows, 2 * rows * width * 4 * width / seconds))
        rates[str(width)] = points
    return rates


def memory_rate(device: torch.device) -> float:
    """Returns the bytes/s at which memory is read and written."""
    source = torch.ones(STREAM_BYTES // FLOAT, device=device)
    target = torch.empty_like(source)
    return 2 * STREAM_BYTES / seconds_of(lambda: target.copy_(source), device)


def host_link_rate(device: torch.device) -> float:
    """Returns the bytes/s from pinned host memory to a GPU."""
    source = torch.ones(STREAM_BYTES // FLOAT).pin_memory()
    target = torch.empty_like(source, device=device)
    return STREAM_BYTES / seconds_of(lambda: target.copy_(source, non_blocking=True), device)


def language_times(nominal: Rates, tree: Measured, device: torch.device) -> Measured:
    """Returns the overhead of passes and decoding: their seconds beyond products and memory traffic."""
    launch = _training(SMALL, 1, 2, device) / (BACKWARD * SMALL.layers)
    rates = Rates(matrix_of(tree["matrix"]), 1.0, tree["memory"], nominal.link, nominal.network)
    rows, length = 16, 64
    products = BACKWARD * arithmetic(rates, USUAL, rows * length, length, "float32", rows * length)
    between = _training(USUAL, rows, length, device) - products - BACKWARD * USUAL.layers * launch
    bytes_between = elementwise(replace(rates, elements=1.0), USUAL, rows * length, "float32")
    engine = _engine(USUAL, device)
    steps, beyond = {}, []
    for batch in BATCHES:
        long, short = (_decoding(engine, batch, tokens, device) for tokens in (DECODED + 1, 1))
        steps[batch] = max(long - short, 1e-9) / DECODED
        computed = arithmetic(rates, USUAL, batch, DECODED, "float32", batch)
        beyond.append(max(steps[batch] - max(computed, USUAL.products_per_token * FLOAT / rates.memory), 0.0))
    # seconds beyond = layers * decode_layer + batch * decode_sequence, by least squares
    slope, constant = np.polyfit(BATCHES, beyond, 1)
    return {
        "launch": launch,
        "elements": max(between, 0.0) / bytes_between,
        "decode_layer": max(float(constant), 0.0) / USUAL.layers,
        "decode_sequence": max(float(slope), 0.0),
        "tokens_per_second": {str(batch): batch / seconds for batch, seconds in steps.items()},
    }


def _network(shape: ModelShape) -> LanguageModel:
    """Returns a Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    options = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LanguageModel(AutoModelForCausalLM.from_config(options))


def _training(shape: ModelShape, rows: int, length: int, device: torch.device) -> float:
    """Returns the seconds of a forward and backward pass of the policy."""
    policy = TokenPolicy(_network(shape), temperature=1.0).to(device)
    mask = (torch.arange(length) >= 1).expand(rows, length)
    inputs = {"tokens": torch.ones(rows, length, dtype=torch.int64), "lengths": torch.full((rows,), length)}
    zeros, ones = torch.zeros(rows, length), torch.ones(rows, dtype=torch.bool)
    batch = RolloutBatch(
        inputs={name: tensor.to(device) for name, tensor in inputs.items()},
        action_mask=mask.to(device),
        sample_mask=ones.to(device),
        group_ids=torch.arange(rows).to(device),
        rewards=zeros.to(device),
        rollout_log_probs=zeros.to(device),
    )

    def work() -> None:
        policy(batch).log_probs.sum().backward()

    return seconds_of(work, device)


def _engine(shape: ModelShape, device: torch.device) -> TorchRolloutEngine:
    model = _network(shape).to(device)
    engine = TorchRolloutEngine(model.config, (), max(BATCHES), device)
    engine.receive(Weights(0, model.state_dict()))
    return engine


def _decoding(engine: TorchRolloutEngine, batch: int, tokens: int, device: torch.device) -> float:
    requests = [Request(index, tuple(range(8)), index) for index in range(batch)]

    def work() -> None:
        done: list[Completion] = []
        engine.generate(requests, SamplingParams(tokens), done.append)

    return seconds_of(work, device)


def all_reduce_seconds(kind: str) -> dict[str, float]:
    """Returns bytes -> seconds of an all-reduce between two devices."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(kind, folder), nprocs=2)
        return dict(json.loads(Path(folder, "seconds.json").read_text(encoding="utf-8")))


def _rank(rank: int, kind: str, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", f"file://{folder}/store", rank=rank, world_size=2)
    seconds = {}
    for size in EXCHANGED:
        tensor, times = torch.ones(size // FLOAT, device=device), []
        for _ in range(6):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        seconds[str(size)] = min(times)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()
