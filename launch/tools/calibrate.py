"""`--plan=calibrate`: measures this machine for later plans, in about a minute.

Once it measures the machine: products of matrices by type, width and rows; the bandwidth of memory and of the link from
host memory to a GPU; the operators of a layer; a training pass; the built-in generation engine at three batch sizes;
two short runs; the disk; the start of a process; all-reduce by size, as soon as a config has several devices. Of each
config it measures the environments, or reads a sample of the prompts. `rl_platform.planner.rates` reads the file. Not
covered: other engines, transfers between nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.placed_config import load
from rl_platform.launch.tools.config_measurements import environment_seconds, policy_seconds, prompt_lengths
from rl_platform.launch.tools.device_measurements import (
    all_reduce_seconds,
    host_link_rate,
    language_times,
    matrix_rates,
    memory_rate,
)
from rl_platform.placement.estimates.hardware import Device, device_of
from rl_platform.placement.inventory import Inventory, cpu_count
from rl_platform.planner.basis import Basis
from rl_platform.planner.calibration import read_measured
from rl_platform.planner.cost import ADVANTAGES
from rl_platform.planner.lengths import expected
from rl_platform.planner.rates import (
    FORM,
    Measured,
    data_sheet,
    fingerprint,
    machine_file,
    measured_rates,
    unusable,
)
from rl_platform.planner.report import plan_report
from rl_platform.runtime.cpu import keep_freed_memory

OPTION = "--plan=calibrate"
BUSY = 0.5  # processes that wait or compute for each core before the measurement; more disturb it
TYPES = ("float32", "bfloat16")
RUN_ROWS, RUN_STEPS, MINI_BATCHES = (64, 256), 8, 2  # responses of a step of the two runs, steps, mini-batches
# the model is so small that a run measures the overhead of runner, engines and components
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
FILE_BYTES = 2**26


def calibrate(config: Config, inventory: Inventory) -> str:
    """Measures, writes the file, and returns the measurement as text.

    Raises ConfigError for GPUs that this machine does not have and for a cache folder that cannot be written; DataError
    for questions that cannot be read.
    """
    began, kind = time.monotonic(), device_of(inventory)
    device = _device(kind, inventory)
    file = machine_file(kind.kind)
    if device.type == "cpu":
        keep_freed_memory()  # as a run does
    known = _known(file)
    reused = bool(known) and known.get("load", 0.0) <= BUSY
    tree = known if reused else _machine(kind, device, file)
    for name in ("environments", "policies", "prompts"):
        tree[name] = known.get(name, {})
    several = inventory.num_accelerators > 1 and (device.type == "cpu" or torch.cuda.device_count() > 1)
    if several and not tree["all_reduce"]:
        tree["all_reduce"] = all_reduce_seconds(device.type)
    names = {kind: fingerprint(config, kind) for kind in ("env", "policy", "data")}
    if config.runner.task_type == "embodied":
        tree["environments"][names["env"]] = environment_seconds(config)
        tree["policies"][names["policy"]] = policy_seconds(config, device)
    else:
        tree["prompts"][names["data"]] = prompt_lengths(config)
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
    tree["load"] = os.getloadavg()[0] / cpu_count() if hasattr(os, "getloadavg") else 0.0
    tree["start"] = _seconds_of_start()
    tree["matrix"] = {dtype: matrix_rates(getattr(torch, dtype), device) for dtype in TYPES}
    tree["memory"] = memory_rate(device)
    if device.type == "cuda":
        tree["host"] = host_link_rate(device)
    tree |= language_times(data_sheet(kind), tree, device)
    tree |= {kind: {} for kind in ("all_reduce", "environments", "policies", "prompts", "overheads")}
    tree["runs"] = {str(rows): _run(rows) for rows in RUN_ROWS}
    tree["overheads"] = _overheads(tree)
    return tree


def _device(kind: Device, inventory: Inventory) -> torch.device:
    if kind.kind == "cpu":
        return torch.device("cpu")
    if inventory.gpu or not torch.cuda.is_available():
        message, hint = "measures this machine, which does not have the config's GPUs", "leave out cluster.inventory"
        raise ConfigError([Problem(OPTION, message, value=kind.kind, hint=hint)])
    return torch.device("cuda")


def _known(file: Path) -> Measured:
    """Returns the stored measurement with the entries of all configs; an empty one if no plan can use it."""
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


def _overheads(tree: Measured) -> dict[str, tuple[float, float]]:
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
            basis = Basis(lengths, measured_rates(tree, device_of(inventory), loaded.config, 1.0))
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
    (few, many), measured = RUN_ROWS, {}
    for name, (first, second) in beyond.items():
        row = max(0.0, (second - first) / (many - few))
        measured[name] = max(0.0, first - few * row) / (MINI_BATCHES if name == "train" else 1), row
    return measured


def _lines(tree: Measured, config: Config, names: Mapping[str, str]) -> list[str]:
    best = {
        dtype: max(rate for points in widths.values() for _, rate in points) for dtype, widths in tree["matrix"].items()
    }
    lines = [
        "products of matrices: " + ", ".join(f"{dtype} up to {rate / 1e9:.0f} GFLOP/s" for dtype, rate in best.items()),
        f"memory: {tree['memory'] / 1e9:.1f} GB/s; "
        + (f"from host memory: {tree['host'] / 1e9:.1f} GB/s; " if "host" in tree else "")
        + f"disk: {tree['disk'] / 1e6:.0f} MB/s",
        f"training passes: {tree['launch'] * 1e6:.0f} us for each layer, {tree['overheads']['train'][0] * 1e3:.2g} ms "
        "for each optimizer step",
        "generation, tokens/s: "
        + ", ".join(f"{rate:.0f} at batch {batch}" for batch, rate in tree["tokens_per_second"].items()),
    ]
    lines += [
        "all-reduce: " + ", ".join(f"{int(size) >> 10} KiB {seconds * 1e3:.2g} ms" for size, seconds in sizes.items())
        for sizes in (tree["all_reduce"],)
        if sizes
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
