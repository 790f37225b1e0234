"""Whole runs that are killed again and again, at random moments, end as a run without a fault, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launcher_forks import Launcher
from run_results import differences, final_state, logged
from waiting import assert_gone, command_line

STEPS, MOST_KILLS = 6, 4
PER_STEP = {"embodied": 4, "two updates ahead": 4}  # rows; other runs: responses
RESPONSES = 8 * 2
TWO_AHEAD = "runner.max_staleness=2", "algorithm.rollout_is={}"
RUNS = {
    "embodied": ("embodied.yaml", "env.num_workers=2", "env.normalize_observations=true"),
    "two updates ahead": ("embodied.yaml", "env.normalize_observations=true", *TWO_AHEAD),
    "reasoning": ("reasoning.yaml", "reward.type=length_score:score", "algorithm.group_size=2"),
    "four updates ahead": (
        "reasoning.yaml",
        "reward.type=length_score:score",
        "algorithm.group_size=2",
        "runner.max_staleness=4",
        "algorithm.rollout_is={}",
    ),
    "four updates ahead, dynamic sampling": (
        "reasoning.yaml",
        "reward.type=length_score:score",
        "algorithm.group_size=2",
        "algorithm.dynamic_sampling={prompts_per_round: 5, max_rounds: 3, on_exhausted: fill_with_rejected}",
        "runner.max_staleness=4",
        "runner.stale=drop",
        "algorithm.rollout_is={}",
    ),
}
INTERVALS = f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.val_check_interval=3"
ON_RAY = (
    "embodied.yaml",
    "env.normalize_observations=true",
    "cluster.devices_per_node=2",
    "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}",
    "cluster.restarts=10",
    "cluster.restart_backoff_s=0",
    "runner.trace_steps=0",
)
SHORT = "embodied", "four updates ahead, dynamic sampling"  # with seed 0, before every change


Start = Callable[..., Launcher]
Results = tuple[dict[str, Any], list[dict[str, Any]], float]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Results]:
    """What runs without a fault left behind, and their seconds; by name."""
    return {}


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return final_state(folder / "out", STEPS), logged(folder / "out")


def expected(name: str, start: Start, folder: Path, undisturbed: dict[str, Results]) -> Results:
    if name not in undisturbed:
        began = time.monotonic()
        run = start(*RUNS[name], *INTERVALS)
        assert run.wait() == 0, run.err.read_text()
        undisturbed[name] = (*results(folder), time.monotonic() - began)
        shutil.rmtree(folder / "out")
    return undisturbed[name]


def written(folder: Path) -> int:
    """Lines of metrics so far."""
    metrics = folder / "out" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def finish(start: Start, folder: Path, words: tuple[str, ...], draw: random.Random, longest_s: float) -> int:
    """Runs the command until it ends by itself, with up to MOST_KILLS kills before; returns their number.

    Each comes at most `longest_s` seconds after the start or one more line of metrics, on a busy machine too.
    """
    kills = 0
    for _ in range(draw.randint(1, MOST_KILLS)):
        run, due = start(*words), written(folder) + draw.randint(0, 1)
        while run.poll() is None and written(folder) < due:
            time.sleep(0.005)
        end = time.monotonic() + draw.uniform(0, longest_s)
        while time.monotonic() < end and written(folder) < STEPS:  # a quick run would end before
            time.sleep(0.005)
        left: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # it has ended
            launcher = psutil.Process(run.pid)
            left = launcher.children(recursive=True)
            launcher.kill()
        kills += run.wait() == -signal.SIGKILL
        assert_gone(left)  # no process outlives its launcher
    run = start(*words)
    assert run.wait() == 0, run.err.read_text()[-3000:]
    return kills


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if seed == 0 and name in SHORT else [pytest.mark.release])
        for name in RUNS
        for seed in range(52)
    ],
)
@pytest.mark.usefixtures("scored")
def test_a_killed_launcher(start, folder: Path, undisturbed: dict[str, Results], name: str, seed: int) -> None:
    state, lines, seconds = expected(name, start, folder, undisturbed)
    draw, kills = random.Random(f"{name} {seed}"), 0
    while not kills:  # on a busy machine a run may end before
        shutil.rmtree(folder / "out", ignore_errors=True)
        kills = finish(start, folder, (*RUNS[name], *INTERVALS), draw, seconds / 4)
    print(f"{name}, seed {seed}: {kills} kills")
    found = results(folder)
    assert differences(found[0], state) == []
    assert differences(found[1], lines) == []
    samples = found[0]["run"]["task"]["samples"]
    counts, carried = samples["counts"], sum(samples["open"].values())
    assert counts["trained"] == STEPS * PER_STEP.get(name, RESPONSES)
    assert counts["issued"] == counts["trained"] + counts["rejected"] + counts["dropped"] + carried
    if "dynamic sampling" not in name:  # which rejects responses, and carries others to a next step
        assert counts["issued"] == counts["trained"]


def hosts() -> list[psutil.Process]:
    """The processes in which components run."""
    return [child for child in psutil.Process().children(recursive=True) if "HostActor" in command_line(child)]


def without_counts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if not name.startswith("runtime/")} for row in lines]


@pytest.mark.release
@pytest.mark.parametrize("seed", range(100))
def test_killed_processes_on_ray(start, address: str, folder: Path, undisturbed: dict[str, Results], seed) -> None:
    """Of launcher, learner and simulation any one; what has ended is started again until the run is done.

    With odd seeds the environments are two updates ahead of training.
    """
    name = "ray, two updates ahead" if seed % 2 else "ray"
    words = (*ON_RAY, *INTERVALS, f"cluster.address={address}", *(TWO_AHEAD if seed % 2 else ()))
    if name not in undisturbed:
        began = time.monotonic()
        run = start(*words)
        assert run.wait() == 0, run.err.read_text()
        undisturbed[name] = (*results(folder), time.monotonic() - began)
        shutil.rmtree(folder / "out")
    state, lines, _ = undisturbed[name]
    draw, kills, left = random.Random(f"ray {seed}"), list[str](), 1 + seed % 3
    code, due = None, draw.randint(0, STEPS - 1)  # lines of metrics before the next kill
    while code != 0:
        run = start(*words)
        while run.poll() is None:
            time.sleep(0.01)
            if not left or written(folder) < due:
                continue
            time.sleep(draw.uniform(0, 0.2))
            with suppress(psutil.NoSuchProcess):
                victim = draw.choice([psutil.Process(run.pid), *hosts()])
                victim.kill()
                kills.append("launcher" if victim.pid == run.pid else "host")
                left, due = left - 1, draw.randint(min(written(folder), STEPS), STEPS)
        code = run.wait()
        assert code == 0 or kills, run.err.read_text()[-3000:]
        assert code in (0, -signal.SIGKILL), run.err.read_text()[-3000:]
    print(f"ray, seed {seed}: {kills}")
    assert kills, "nothing was killed"
    found = results(folder)
    assert differences(found[0], state) == []
    assert differences(without_counts(found[1]), without_counts(lines)) == []
