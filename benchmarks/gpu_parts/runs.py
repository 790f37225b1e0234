"""Whole runs of shipped configs: reasoning with a kill and a resume, embodied, and the shapes of a recipe."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import rl_platform as rl
from gpu_parts.part import Report, Setup, at_most
from rl_platform.errors import DataError
from rl_platform.metrics import read_metrics
from rl_platform.placement.estimates.hardware import GIB

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TIMES = ("time/", "perf/", "runtime/", "staleness/seconds")
Overrides = dict[str, object]
WAIT_S = 0.02


def train(config: str, overrides: Overrides, environment: Mapping[str, str], log: str) -> None:
    """Trains in a process of its own, with output to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ |= environment
    rl.train(config, overrides, show=False)


def started(
    setup: Setup, config: str, folder: Path, overrides: Overrides, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Starts a run in `folder`; one that has checkpoints there is resumed. Returns its process."""
    given = {"runner.output_dir": str(folder), "runner.logger_backends": []} | overrides
    arguments = (str(CONFIGS / config), given, environment or {}, str(folder) + ".log")
    process: BaseProcess = get_context(setup.start).Process(target=train, args=arguments)
    process.start()
    return process


def finished(process: BaseProcess, folder: Path) -> list[dict[str, float]]:
    """Returns the run's metrics when it has ended. Raises RuntimeError with its output if it failed."""
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the run ended with {process.exitcode}:\n{Path(str(folder) + '.log').read_text()[-3000:]}")
    return read_metrics(folder)


def steps_of(folder: Path) -> int:
    try:
        return int(max((row.get("step", 0) for row in read_metrics(folder)), default=0))
    except DataError:  # the file does not exist yet
        return 0


def killed_at(process: BaseProcess, folder: Path, step: int) -> None:
    """Kills the run once the metrics of `step` are written."""
    while process.is_alive() and steps_of(folder) < step:
        time.sleep(WAIT_S)
    process.kill()
    process.join()


def ppo(setup: Setup, report: Report, dtype: str) -> None:
    """Compares an uninterrupted run with one that is killed halfway and resumed, with `runner.deterministic`."""
    config = "reasoning/ppo_tiny.yaml"
    steps, kill = (3, 1) if setup.small else (40, 20)
    place = {"cluster.component_placement": {"actor,critic,rollout,reward": "0"}}
    overrides: Overrides = place | {"actor.model.dtype": dtype, "runner.max_steps": steps, "runner.save_interval": 1}
    overrides |= {"runner.val_check_interval": steps, "runner.deterministic": True}
    if setup.small:
        overrides |= {"data.train_batch_size": 16, "data.mini_batch_size": 8, "data.val_size": 8}
        overrides |= {"reward.num_workers": 1}
    whole, resumed = setup.folder / "whole", setup.folder / "resumed"
    expected = finished(started(setup, config, whole, overrides), whole)
    killed_at(started(setup, config, resumed, overrides), resumed, kill)
    before = steps_of(resumed)
    found = finished(started(setup, config, resumed, overrides), resumed)
    times = [row["time/step"] for row in expected if "time/step" in row]
    report("a step", median(times[len(times) // 4 :]), "s")
    report("a checkpoint", median(row["time/checkpoint"] for row in expected if "time/checkpoint" in row), "s")
    report("step after which the run was killed", before)
    report("steps missing after the resume", steps - steps_of(resumed), "", at_most(0))
    report("largest difference of a metric between the two runs", difference(expected, found), "", at_most(0))
    for name in ("reward/raw_mean", "val/accuracy"):
        values = [row[name] for row in expected if name in row]
        if values:
            report(f"{name} of the last step", values[-1])


def difference(expected: list[dict[str, float]], found: list[dict[str, float]]) -> float:
    """Returns the largest relative difference of metrics other than times, over all steps of both runs."""
    other = {row["step"]: row for row in found}
    worst = 0.0
    for row in expected:
        for name, value in row.items():
            same = other.get(row["step"], {}).get(name, math.nan)
            if name.startswith(TIMES) or not math.isfinite(value + same):
                continue
            worst = max(worst, abs(value - same) / max(abs(value), abs(same), 1e-6))
    return worst


def embodied(setup: Setup, report: Report) -> None:
    """Reports environment steps per second, with the policy and its training on the GPU and on the CPU."""
    base: Overrides = {"cluster.component_placement": {"actor_critic,env,rollout": "0"}, "runner.val_check_interval": 0}
    base |= {"runner.max_steps": 2 if setup.small else 8}
    if setup.small:
        base |= {"env.num_envs": 2, "env.rollout_steps": 16, "data.mini_batch_size": 16}
    for width in (64,) if setup.small else (64, 1024):
        for place, environment in (("CPU", {"CUDA_VISIBLE_DEVICES": ""}), ("GPU", None)):
            if setup.small and place == "GPU":
                continue
            folder = setup.folder / f"{place}-{width}"
            overrides = base | {"actor.model.hidden_sizes": [width, width], "actor.device": place.lower()}
            rows = finished(started(setup, "embodied/cartpole.yaml", folder, overrides, environment), folder)
            report(f"two layers of {width}, on a {place}", speed(rows, "perf/env_steps_per_sec"), "steps/s")


def warp(setup: Setup, report: Report) -> None:
    """Reports environment steps per second with MuJoCo, and with MuJoCo Warp by each path of its rollouts.

    Reports those of a whole run and those of its rollouts alone. In a small run all devices are the CPU.
    """
    base: Overrides = {"cluster.component_placement": {"actor_critic,env,rollout": "0"}, "runner.val_check_interval": 0}
    base |= {"env.evaluation.video": False}
    if setup.small:
        base |= {"runner.max_steps": 1, "env.num_envs": 2, "env.rollout_steps": 4, "data.mini_batch_size": 8}
        base |= {"env.max_episode_steps": 10}  # the last step is followed by an evaluation
    else:
        base |= {"runner.max_steps": 4, "env.num_envs": 1024}
    there: Overrides = {"env.backend": "mujoco_warp", "actor.device": "auto" if setup.small else "gpu"}
    variants: dict[str, Overrides] = {
        "mujoco": {},
        "mujoco_warp, through main memory": there | {"env.on_device": False},
        "mujoco_warp, rollouts stay on the device": there,
    }
    for number, (name, overrides) in enumerate(variants.items()):
        folder = setup.folder / str(number)
        rows = finished(started(setup, "embodied/ppo.yaml", folder, base | overrides), folder)
        report(name, speed(rows, "perf/env_steps_per_sec"), "steps/s")
        alone = [{"speed": row["perf/env_steps"] / row["time/collect"]} for row in rows if "time/collect" in row]
        report(f"{name}: rollouts alone", speed(alone, "speed"), "steps/s")


def speed(rows: list[dict[str, float]], name: str) -> float:
    """Returns the median of a metric without the first step, which compiles and allocates."""
    values = [row[name] for row in rows if name in row]
    return median(values[1:] or values)


def recipe(setup: Setup, report: Report) -> None:
    """Reports seconds of the phases and of a checkpoint of a recipe on one GPU, and its peak memory beside the plan's.

    Questions and weights are random, so responses have their greatest length.
    """
    began = time.monotonic()
    config, overrides = "reasoning/recipes/qwen2.5_0.5b_gsm8k_1gpu.yaml", recipe_overrides(setup)
    folder = setup.folder / "run"
    planned = rl.plan(str(CONFIGS / config), overrides).data["devices"][0]["memory_bytes"]["peak"] / GIB
    report("peak memory in the plan", planned, "GiB")
    process = started(setup, config, folder, overrides)
    reported = 0
    while process.is_alive():  # a part that is stopped keeps what it has reported
        process.join(1.0)
        while reported < steps_of(folder):
            reported += 1
            report(f"seconds from the start to the end of step {reported}", time.monotonic() - began, "s")
    rows = finished(process, folder)
    report("steps missing", 5 - steps_of(folder), "", at_most(0))
    measured = max(row.get("perf/memory_peak", 0.0) for row in rows)
    report("peak memory of torch's allocator", measured, "GiB", None if setup.small else at_most(planned))
    for phase in sorted({name for row in rows for name in row if name.startswith("time/") and "." not in name}):
        report(phase, speed(rows, phase), "s")
    for name, unit in (("perf/tokens_per_sec", "tokens/s"), ("perf/mfu", "")):
        if any(name in row for row in rows):
            report(name, speed(rows, name), unit)


def recipe_overrides(setup: Setup) -> Overrides:
    """Writes random weights and questions; returns overrides for five steps and a checkpoint after the last."""
    from _language import gpu_shape, network

    from rl_platform.placement.estimates.architectures import known_options

    shape: dict[str, Any] = known_options("Qwen/Qwen2.5-0.5B") or {}
    model = setup.folder / "model"
    shape = gpu_shape(dry_run=True) if setup.small else {**shape, "max_position_embeddings": 32_768}
    network(shape).save_pretrained(model)
    draw = random.Random(0)
    for name, count in (("train", 2000), ("val", 20)):
        rows = [
            {
                "question": "".join(draw.choices("abcdefgh ", k=draw.randint(100, 400))),
                "answer": str(draw.randint(0, 9)),
            }
            for _ in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (setup.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    overrides: Overrides = {
        "cluster.inventory": None,
        "cluster.component_placement": {"actor,critic,rollout,reward": "0"},
        "actor.model.path": str(model),
        "actor.model.tokenizer": "bytes",
        "data.task.path": str(setup.folder / "train.jsonl"),
        "data.task.val_path": str(setup.folder / "val.jsonl"),
        "data.val_size": 20,
        "data.use_chat_template": False,
        "reward.type": "exact_match",
        "runner.max_steps": 5,
        "runner.val_check_interval": 0,
        "runner.save_interval": 5,
    }
    if setup.small:
        overrides |= {"data.train_batch_size": 4, "data.mini_batch_size": 2, "data.max_response_length": 4}
        overrides |= {"rollout.max_running_requests": 4, "reward.num_workers": 1, "actor.model.dtype": "float32"}
    return overrides
