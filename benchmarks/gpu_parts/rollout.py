"""Generation: the torch engine by prompt length, and SGLang and vLLM if they are installed."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from _language import gpu_shape, network

from gpu_parts.part import Report, Setup, at_most, fast
from gpu_parts.weights import size_of
from rl_platform.engines.rollout.base import Completion, Request, RolloutEngine
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.attention import cached_heads
from rl_platform.models.language import LanguageModel
from rl_platform.records import SamplingParams, Weights

NEW = 128
CASES = ((64, 128), (64, 1024), (256, 512), (64, 8064))  # responses, tokens of a prompt
AT_ONCE = (256, 512, 64)  # responses, tokens of a prompt, responses decoded together


def generated(engine: RolloutEngine, rows: int, prompt: int, new: int, seed: int) -> tuple[float, int]:
    """Returns seconds and tokens of `rows` responses of `new` tokens to random prompts."""
    draw, done = torch.Generator().manual_seed(seed), list[Completion]()
    prompts = torch.randint(1, 500, (rows, prompt), generator=draw).tolist()
    requests = [Request(index, tuple(ids), index) for index, ids in enumerate(prompts)]
    began = time.perf_counter()
    engine.generate(requests, SamplingParams(new), done.append)
    return time.perf_counter() - began, sum(len(one.log_probs) for one in done)


def measure(setup: Setup, report: Report) -> None:
    """Reports tokens per second and milliseconds of a decoding step."""
    # a decoding step: (seconds of N tokens - seconds of 1 token) / (N - 1)
    new, cases = (8, ((4, 16),)) if setup.small else (NEW, CASES)
    dtype = torch.float32 if setup.small else torch.bfloat16
    plain = network(gpu_shape(setup.small), setup.device)
    state = LanguageModel(plain).state_dict()  # float32 as the trainer's, so the engine copies them
    weights = size_of(state) // torch.float32.itemsize * dtype.itemsize
    bandwidth = bytes_per_second(setup)
    report("memory bandwidth of a copy, reads and writes", bandwidth / 1e12, "TB/s")
    engine = TorchRolloutEngine(plain.config, (), max(rows for rows, _ in cases), setup.device, dtype)
    engine.receive(Weights(0, state))
    if not setup.small:
        report("the engine decodes without its kernels", engine._decoding is None, "", at_most(0))
    for rows, prompt in cases:
        if not setup.small:
            generated(engine, rows, prompt, new, seed=0)  # warms up, and captures the graphs of all numbers of rows
        first, _ = generated(engine, rows, prompt, 1, seed=1)
        seconds, tokens = generated(engine, rows, prompt, new, seed=2)
        step = (seconds - first) / (new - 1)
        read = weights + rows * (prompt + new / 2) * token_bytes(plain.config, dtype)
        name = f"{rows} responses of {new} tokens to prompts of {prompt:,}"
        report.rate(name, tokens, seconds, "tokens/s")
        report.rate(f"{name}: the prompts", rows * prompt, first, "tokens/s")
        report(f"{name}: a decoding step", 1e3 * step, "ms")
        report(f"{name}: share of the speed at which weights, keys and values are read", read / bandwidth / step)
        report(f"{name}: missing tokens", rows * new - tokens, "", at_most(0))
    rows, prompt, engine.max_running = (4, 16, 2) if setup.small else AT_ONCE
    seconds, tokens = generated(engine, rows, prompt, new, seed=2)
    name = f"{rows} responses of {new} tokens to prompts of {prompt:,}, {engine.max_running} decoded together"
    report.rate(name, tokens, seconds, "tokens/s")


def bytes_per_second(setup: Setup) -> float:
    source = torch.empty(2**20 if setup.small else 2**32, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / setup.seconds(lambda: target.copy_(source))


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes of the keys and values of a token."""
    heads, width = cached_heads(config)
    return int(2 * config.num_hidden_layers * heads * width * dtype.itemsize)


def sglang(setup: Setup, report: Report) -> None:
    """Reports the numbers of rollout_gpu.py. Each engine runs in a process of its own."""
    import rollout_gpu

    settings = argparse.Namespace(
        dry_run=setup.small, requests=256, prompt=512, tokens=512, gpus=1, rounds=2, warm_up=1
    )
    if setup.small:
        settings.requests, settings.prompt, settings.tokens, settings.rounds = 4, 8, 8, 1
    tokens, rates = settings.requests * settings.tokens, {}
    for name, run in ((rollout_gpu.ALONE, rollout_gpu.alone), (rollout_gpu.OURS, rollout_gpu.ours)):
        folder = setup.folder / run.__name__
        folder.mkdir()
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rates[name] = tokens / median(process.submit(run, settings, str(folder)).result())
        report(name, rates[name], "tokens/s")
    share = rates[rollout_gpu.OURS] / rates[rollout_gpu.ALONE]
    report("the platform's share of SGLang's own throughput", share, "", fast(rollout_gpu.TARGET))


def vllm(setup: Setup, report: Report) -> None:
    """Reports tokens per second of vLLM in the interpreter of --vllm-python, after an update of its weights."""
    from rl_platform.engines.rollout.hosted.hosted_engine import visible_gpus
    from rl_platform.engines.rollout.vllm.client import VLLMEngine, VLLMSetup

    requests, prompt, tokens = (4, 8, 8) if setup.small else (256, 512, 512)
    plain = network(gpu_shape(setup.small))
    described = plain.config.to_dict() | {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": None}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    setup_of_vllm = VLLMSetup(
        model_config=described,
        tensor_parallel=1,
        dtype="float32" if setup.small else "bfloat16",
        max_running=requests,
        longest=prompt + tokens,
        memory_share=0.6,
        seed=1,
        gpus=() if setup.small else (visible_gpus()[0],),
        python=setup.vllm_python,
    )
    with closing(VLLMEngine("rollout", setup_of_vllm, (), {}, setup.folder / "vllm.log")) as engine:
        engine.receive(Weights(0, LanguageModel(plain).state_dict()))
        generated(engine, requests, prompt, 2, seed=0)  # warms up
        seconds, found = generated(engine, requests, prompt, tokens, seed=1)
    report.rate("vLLM in the platform", found, seconds, "tokens/s")
    report("missing tokens", requests * tokens - found, "", at_most(0))
