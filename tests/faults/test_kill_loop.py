"""Whole runs that are killed again and again, at random moments, end as a run without a fault, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launcher_forks import Launchers
from run_results import differences, final_state, logged

STEPS, MOST_KILLS = 6, 4
RUNS = {
    "embodied": ("embodied.yaml", "env.num_workers=2", "env.normalize_observations=true"),
    "reasoning": ("reasoning.yaml", "reward.type=length_score:score", "algorithm.group_size=2"),
}
INTERVALS = f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.val_check_interval=3"
SHORT, LONG = range(2), range(2, 52)  # seeds of the tests before every change and before a release


@pytest.fixture(scope="module")
def launchers() -> Iterator[Launchers]:
    with Launchers() as started:
        yield started


Results = tuple[dict[str, Any], list[dict[str, Any]], float]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Results]:
    """What runs without a fault left behind, and their seconds; by name."""
    return {}


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return final_state(folder / "out", STEPS), logged(folder / "out")


def expected(name: str, launchers: Launchers, folder: Path, undisturbed: dict[str, Results]) -> Results:
    if name not in undisturbed:
        began = time.monotonic()
        launchers.start(folder, *RUNS[name], *INTERVALS)
        assert launchers.wait() == 0, (folder / "output").read_text()
        undisturbed[name] = (*results(folder), time.monotonic() - began)
        shutil.rmtree(folder / "out")
    return undisturbed[name]


def finish(launchers: Launchers, folder: Path, words: tuple[str, ...], moments: list[float]) -> int:
    """Runs the command until it ends by itself, killed after so many seconds of its first starts; counts the kills."""
    kills = 0
    for seconds in [*moments, None]:
        pid = launchers.start(folder, *words)
        if seconds is not None:
            launcher, left = psutil.Process(pid), []
            time.sleep(seconds)
            with suppress(psutil.NoSuchProcess):  # it has ended
                left = launcher.children(recursive=True)
                launcher.kill()
            kills += launchers.wait() == -signal.SIGKILL
            assert not psutil.wait_procs(left, 10)[1], "processes outlive their launcher"
        else:
            assert launchers.wait() == 0, (folder / "output").read_text()[-3000:]
    return kills


@pytest.mark.parametrize("seed", [*SHORT, *(pytest.param(seed, marks=pytest.mark.release) for seed in LONG)])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("scored")
def test_a_killed_launcher(launchers, folder: Path, undisturbed: dict[str, Results], name: str, seed: int) -> None:
    state, lines, seconds = expected(name, launchers, folder, undisturbed)
    draw = random.Random(f"{name} {seed}")
    moments = [draw.uniform(0, seconds) for _ in range(draw.randint(1, MOST_KILLS))]
    kills = finish(launchers, folder, (*RUNS[name], *INTERVALS), moments)
    print(f"{name}, seed {seed}: {kills} kills")
    found = results(folder)
    assert differences(found[0], state) == []
    assert differences(found[1], lines) == []
