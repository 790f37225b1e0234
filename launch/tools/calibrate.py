"""`--plan=calibrate`: measures this machine for later plans, in about a minute.

Once it measures the machine: products of matrices by type, width and rows; memory bandwidth; the operators of a layer;
a training pass; the built-in generation engine at three batch sizes; two short runs; the disk; the start of a process;
all-reduce by size, as soon as a config has several devices. Of each config it measures the environments, or reads a
sample of the prompts. `rl_platform.planner.rates` reads the file. Not covered: other engines, transfers between nodes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import LocalPolicy, PolicyRollout
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.pictures.drawing import CannotDraw, with_drawing
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.envs.reasoning.prompts import build_prompts
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.command import load
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.placement.estimates.hardware import Device, device_of
from rl_platform.placement.estimates.model_shape import FLOAT, ModelShape
from rl_platform.placement.inventory import Inventory
from rl_platform.planner.calibration import read_measured
from rl_platform.planner.cost import ADVANTAGES, BACKWARD, Basis, arithmetic, elementwise
from rl_platform.planner.lengths import expected, sampled
from rl_platform.planner.rates import (
    FORM,
    Machine,
    Measured,
    Rates,
    cores,
    data_sheet,
    fingerprint,
    machine_file,
    matrix_of,
    unusable,
)
from rl_platform.planner.report import plan_report
from rl_platform.records import RolloutBatch, SamplingParams, Weights
from rl_platform.runtime.cpu import keep_freed_memory
from rl_platform.runtime.host import ComponentContext

OPTION = "--plan=calibrate"
BUSY = 0.5  # processes that wait or compute for each core before the measurement; more disturb it
WIDTHS, ROWS, TYPES = (64, 128, 256, 512, 1024), (1, 16, 256, 2048), ("float32", "bfloat16")
LEAST_S, MOST_S = 0.002, 0.3  # seconds of one round, which repeats short calls; seconds of all rounds
RUN_ROWS, RUN_STEPS, MINI_BATCHES = (64, 256), 8, 2  # responses of a step of the two runs, steps, mini-batches
# a model so small that a run takes what the runner, the engines and the components take beside the model
RUN = """
runner:
  {task_type: reasoning, experiment_name: calibration, trace_steps: 0, logger_backends: [], val_check_interval: 0}
cluster: {component_placement: {'actor,critic,rollout,reward': 0}}
algorithm: {loss_type: actor}
data:
  task: {type: digits, params: {operation: last, length: 4}}
  train_size: 1000
  max_prompt_length: 16
  max_response_length: 4
  use_chat_template: false
actor:
  model:
    random_init: {hidden_size: 64, num_layers: 2, num_heads: 4, intermediate_size: 256, max_positions: 64}
    tokenizer: bytes
critic: {use_critic_model: true}
"""
ROUNDS, ENOUGH_S = 4, 15.0  # rollouts of an embodied policy; none begins after so many seconds
EPISODES_S = 0.03  # seconds of one round of an environment, which has to begin new episodes in it
BATCHES, DECODED = (1, 8, 32), 32
STREAM_BYTES, FILE_BYTES = 2**28, 2**26
EXCHANGED = (2**12, 2**20, 2**24)  # bytes of an all-reduce
PROMPTS = 512
SMALL = ModelShape(512, 64, 8, 4, 4, 16, 128, tied=True)  # its operators take longer than their arithmetic
USUAL = ModelShape(8192, 576, 4, 9, 3, 64, 1536, tied=True)


def calibrate(config: Config, inventory: Inventory) -> str:
    """Measures, writes the file, and returns the measurement as text.

    Raises ConfigError for GPUs that this machine does not have and for a cache folder that cannot be written; DataError
    for questions that cannot be read.
    """
    began, kind = time.monotonic(), device_of(inventory)
    device = _device(kind, inventory)
    file = machine_file(kind.kind)
    keep_freed_memory()  # as a run does
    known = _known(file)
    reused = bool(known) and known.get("load", 0.0) <= BUSY
    tree = known if reused else _machine(kind, device, file)
    for name in ("environments", "policies", "prompts"):
        tree[name] = known.get(name, {})
    several = inventory.accelerators > 1 and (device.type == "cpu" or torch.cuda.device_count() > 1)
    if several and not tree["all_reduce"]:
        tree["all_reduce"] = _all_reduce(device.type)
    names = {kind: fingerprint(config, kind) for kind in ("env", "policy", "data")}
    if config.runner.task_type == "embodied":
        tree["environments"][names["env"]] = _environment(config)
        tree["policies"][names["policy"]] = _policy(config, device)
    else:
        tree["prompts"][names["data"]] = _prompts(config)
    _write(file, json.dumps(tree, indent=1))
    stored = f"{time.monotonic() - began:.0f} s; later plans read {file}"
    if tree["load"] > BUSY:
        busy = f"other work ran here ({tree['load']:.1f} processes for each core), so the rates are too low"
        return "\n".join((*_lines(tree, config, names), stored, f"{busy}: the next {OPTION} measures again")) + "\n"
    if reused:
        stored += f"; the machine itself was measured on {tree['date']}, and will be again without that file"
    return "\n".join((*_lines(tree, config, names), stored)) + "\n"


def _machine(kind: Device, device: torch.device, file: Path) -> Measured:
    """Returns the measurement of the machine, without that of a config."""
    tree: Measured = {"form": FORM, "date": f"{datetime.now():%Y-%m-%d}", "disk": _disk(file)}
    tree["load"] = os.getloadavg()[0] / cores() if hasattr(os, "getloadavg") else 0.0
    tree["start"] = _seconds_of_start()
    tree["matrix"] = {dtype: _matrix(getattr(torch, dtype), device) for dtype in TYPES}
    source = torch.ones(STREAM_BYTES // FLOAT, device=device)
    target = torch.empty_like(source)
    tree["memory"] = 2 * STREAM_BYTES / _seconds(lambda: target.copy_(source), device)
    tree |= _language(data_sheet(kind), tree, device)
    tree |= {kind: {} for kind in ("all_reduce", "environments", "policies", "prompts", "overheads")}
    tree["runs"] = {str(rows): _run(rows) for rows in RUN_ROWS}
    tree["overheads"] = _overheads(tree, file)
    return tree


def _device(kind: Device, inventory: Inventory) -> torch.device:
    if kind.kind == "cpu":
        return torch.device("cpu")
    if inventory.gpu or not torch.cuda.is_available():
        message, hint = "measures this machine, which does not have the config's GPUs", "leave out cluster.inventory"
        raise ConfigError([Problem(OPTION, message, value=kind.kind, hint=hint)])
    return torch.device("cuda")


def _known(file: Path) -> Measured:
    """Returns the stored measurement, whose entries of other configs are kept; an empty one if no plan can use it."""
    try:
        tree: Measured = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {} if unusable(tree) else tree


def _write(file: Path, text: str) -> None:
    """Replaces the file atomically, so that a plan never reads a part of it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as stage:
            stage.write(text)
        os.replace(stage.name, file)
    except OSError as error:
        raise ConfigError([_not_written(file, error)]) from error


def _not_written(file: Path, error: OSError) -> Problem:
    message = f"the measurement cannot be stored: {error.strerror or error}"
    return Problem(OPTION, message, value=str(file), hint="RL_PLATFORM_CACHE names another folder")


def _seconds(work: Callable[[], object], device: torch.device, least: float = LEAST_S) -> float:
    """Returns the seconds of one call: the median of rounds of at least `least` seconds, after a warm-up call."""

    def round_of(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    first, began = round_of(1), time.perf_counter()
    calls, rounds = max(1, round(least / max(first, 1e-7))), []
    while not rounds or time.perf_counter() - began < MOST_S:
        rounds.append(round_of(calls))
    return statistics.median(rounds)


def _disk(file: Path) -> float:
    """Returns the bytes/s at which a file in the folder of the measurement is written and synced."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent) as written:
            began = time.perf_counter()
            written.write(os.urandom(2**20) * (FILE_BYTES // 2**20))
            written.flush()
            os.fsync(written.fileno())
            return FILE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        raise ConfigError([_not_written(file, error)]) from error


def _seconds_of_start() -> float:
    """Returns the seconds until a new process has imported the modules of a run."""
    began = time.perf_counter()
    code = "import transformers, rl_platform.launch.session"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _matrix(dtype: torch.dtype, device: torch.device) -> dict[str, list[tuple[int, float]]]:
    """Returns width -> (rows, FLOP/s) of products with a matrix [width, 4 * width]."""
    rates = {}
    for width in WIDTHS:
        matrix, points = torch.ones(width, 4 * width, dtype=dtype, device=device), []
        for rows in ROWS:
            left = torch.ones(rows, width, dtype=dtype, device=device)
            seconds = _seconds(lambda left=left, matrix=matrix: left @ matrix, device)
            points.append((rows, 2 * rows * width * 4 * width / seconds))
        rates[str(width)] = points
    return rates


def _language(nominal: Rates, tree: Measured, device: torch.device) -> Measured:
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


def _run(rows: int) -> dict[str, float]:
    """Returns medians of a short run with `rows` responses in a step: seconds of each phase and of a step."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.yaml")
        config.write_text(RUN, encoding="utf-8")
        settings = [*_sizes(rows), f"runner.max_steps={RUN_STEPS}", f"runner.output_dir={folder}/run"]
        code = "from rl_platform.launch.cli import main; main()"
        command = [sys.executable, "-c", code, str(config), *settings]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            message = f"a short run failed: {ended.stderr.strip()[-300:]}"
            raise ConfigError([Problem(OPTION, message, hint="rl-platform doctor checks the installation")])
        measured = read_measured(Path(folder, "run"))
    return {**measured.seconds, "prompt": measured.metrics["len/prompt_mean"]}


def _sizes(rows: int) -> list[str]:
    return [f"data.train_batch_size={rows}", f"data.mini_batch_size={rows // MINI_BATCHES}"]


def _overheads(tree: Measured, file: Path) -> dict[str, tuple[float, float]]:
    """Returns the overheads of the phases: what the two runs took beyond their prediction, of a call or an optimizer
    step and of each row.
    """
    beyond: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "run.yaml")
        config.write_text(RUN, encoding="utf-8")
        for rows in RUN_ROWS:
            loaded, placement, inventory = load(str(config), _sizes(rows))
            measured, known = tree["runs"][str(rows)], expected(loaded.config)
            lengths = replace(known, prompts=(round(measured["prompt"]),))
            basis = Basis(lengths, Machine(file, tree).rates(device_of(inventory), loaded.config, 1.0))
            spans = plan_report(loaded.config, placement, inventory, basis).spans
            predicted = {span.phase: span.seconds for span in spans if not span.note}
            predicted.pop(ADVANTAGES, None)
            rest = measured["step"] - sum(measured[phase] for phase in predicted)
            over = {phase: measured[phase] - seconds for phase, seconds in predicted.items()}
            for name, value in (
                ("generate", over["generate"]),
                ("evaluate", (over["log-probs"] + over["values"]) / 2),
                ("train", (over["train critic"] + over["train actor"]) / 2),
                ("advantages", rest),
            ):
                beyond.setdefault(name, []).append(value)
    (few, many), found = RUN_ROWS, {}
    for name, (first, second) in beyond.items():
        row = max(0.0, (second - first) / (many - few))
        found[name] = max(0.0, first - few * row) / (MINI_BATCHES if name == "train" else 1), row
    return found


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

    return _seconds(work, device)


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

    return _seconds(work, device)


def _all_reduce(kind: str) -> dict[str, float]:
    """Returns bytes -> seconds of an all-reduce between two devices."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(kind, folder), nprocs=2)
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


def _environment(config: Config) -> dict[str, float]:
    """Returns the seconds of one environment's step on one worker."""
    env = config.env
    description, count, cpu = EnvDescription.of(env), env.num_envs, torch.device("cpu")

    def start(variables: Mapping[str, str]) -> tuple[VectorEnv, np.ndarray]:
        envs = VectorEnv(description, count, env.num_workers, env.step_timeout_s, worker_variables=variables)
        return envs, envs.reset(range(count))

    try:
        envs, _ = start({}) if description.pixels is None else with_drawing(True, start)
    except CannotDraw as error:
        raise ConfigError([Problem("env.pixels", f"nothing can be drawn on this machine: {error}")]) from error
    try:
        spaces, random = envs.spaces, np.random.default_rng(0)
        shape = (count, *spaces.policy_action_shape)
        if spaces.action.kind == "continuous":  # the environments cut them at their bounds
            actions = random.uniform(-1, 1, shape).astype(np.float32)
        else:
            actions = np.zeros(shape, np.int64)
        seconds = {"step": _seconds(lambda: envs.step(actions), cpu, EPISODES_S) / count * max(1, env.num_workers)}
    finally:
        envs.close()
    return seconds


def _policy(config: Config, device: torch.device) -> dict[str, float]:
    """Returns the seconds of a step of all environments with the policy's actions, of the log-probs of a row, and of an
    optimizer step: the shortest of a few rollouts, with random weights and advantages of 0."""
    accelerators = () if device.type == "cpu" else (0,)

    def context(name: str) -> ComponentContext:
        return ComponentContext(name, 0, 1, accelerators, config.runner.seed)

    algorithm = config.algorithm.model_copy(update={"ppo_epochs": 1, "target_kl": None})
    once = config.model_copy(update={"algorithm": algorithm})
    environment = Environment(context("env"), config)
    try:
        spaces = environment.envs.spaces
        actor = EmbodiedActor(context("actor_critic"), once, spaces)
        rollout = PolicyRollout(context("rollout"), config, spaces)
        rollout.receive(actor.publish(0))
        rounds: list[tuple[float, float, float]] = []
        began = time.perf_counter()
        while len(rounds) < ROUNDS and time.perf_counter() - began < ENOUGH_S:
            start = time.perf_counter()
            batch = environment.collect(len(rounds), LocalPolicy(rollout))[0]
            collected = time.perf_counter()
            fields = actor.evaluate(batch)
            evaluated = time.perf_counter()
            zeros = torch.zeros_like(batch.rewards)
            actor.update(replace(batch, **fields, advantages=zeros, returns=zeros).flatten(), len(rounds))
            rounds.append((collected - start, evaluated - collected, time.perf_counter() - evaluated))
    finally:
        environment.close()
    rows = config.env.num_envs * config.env.rollout_steps
    counts = {
        "collect": config.env.rollout_steps,
        "evaluate": rows,
        "update": max(1, rows // config.mini_batch_size("actor")),
    }
    return {name: min(times) / counts[name] for name, times in zip(counts, zip(*rounds, strict=True), strict=True)}


def _prompts(config: Config) -> list[int]:
    """Returns the lengths of a sample of the training prompts."""
    few = {"train_size": min(PROMPTS, config.data.train_size)}
    questions = build_questions(config.data.model_copy(update=few), config.runner.seed).train
    chosen = questions[:: max(1, len(questions) // PROMPTS)][:PROMPTS]
    prompts = build_prompts(chosen, load_tokenizer(config.actor.model), config.data).prompts
    return list(sampled([len(prompt.token_ids) for prompt in prompts]))


def _lines(tree: Measured, config: Config, names: Mapping[str, str]) -> list[str]:
    best = {
        dtype: max(rate for points in widths.values() for _, rate in points) for dtype, widths in tree["matrix"].items()
    }
    lines = [
        "products of matrices: " + ", ".join(f"{dtype} up to {rate / 1e9:.0f} GFLOP/s" for dtype, rate in best.items()),
        f"memory: {tree['memory'] / 1e9:.1f} GB/s; disk: {tree['disk'] / 1e6:.0f} MB/s",
        f"training passes: {tree['launch'] * 1e6:.0f} us for each layer, {tree['overheads']['train'][0] * 1e3:.2g} ms "
        "for each optimizer step",
        "generation, tokens/s: "
        + ", ".join(f"{rate:.0f} at batch {batch}" for batch, rate in tree["tokens_per_second"].items()),
    ]
    lines += [
        "all-reduce: " + ", ".join(f"{int(size) >> 10} KiB {seconds * 1e3:.2g} ms" for size, seconds in found.items())
        for found in (tree["all_reduce"],)
        if found
    ]
    if config.runner.task_type == "embodied":
        step, policy = tree["environments"][names["env"]]["step"], tree["policies"][names["policy"]]
        lines.append(f"{config.env.name}: {1 / step:.0f} steps/s of a worker")
        rate = config.env.num_envs / policy["collect"]
        return [
            *lines,
            f"policy: {rate:.0f} steps/s with its actions, {policy['update'] * 1e3:.2g} ms per optimizer step",
        ]
    prompts = tree["prompts"][names["data"]]
    return [*lines, f"prompts: {sum(prompts) / len(prompts):.4g} tokens on average"]
