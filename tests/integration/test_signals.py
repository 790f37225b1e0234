"""Ctrl-C and SIGTERM: a prompt end with a clear message, no process left, the last checkpoint intact."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from rl_platform.checkpoint import Checkpoint

TASKS = ("reasoning.yaml",), ("embodied.yaml", "env.num_workers=2")
LONG = "runner.max_steps=100000", "runner.save_interval=1"
LARGE_UPDATE = "runner.max_steps=100000", "algorithm.ppo_epochs=1000000"


@pytest.fixture
def interrupt(start, folder: Path):
    """Starts a run and signals it once `file` is not empty; returns exit code, messages and seconds until the end."""

    def run(number: signal.Signals, file: str, *arguments: str) -> tuple[int, str, float]:
        process = start(*arguments)
        until = time.monotonic() + 120
        while not any(path.stat().st_size for path in folder.glob(file)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        began = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        seconds = time.monotonic() - began
        psutil.wait_procs(children, timeout=1)
        assert not [child for child in children if child.is_running()]
        return process.returncode, errors, seconds

    return run


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task[0])
def test_a_run_is_stopped(interrupt, number: signal.Signals, code: int, word: str, task: tuple[str, ...]):
    returned, errors, seconds = interrupt(number, "out/checkpoints/step-*", *task, *LONG)
    assert returned == code
    assert seconds < 5
    checkpoints = sorted(Path("out/checkpoints").glob("step-*"))
    newest = [Checkpoint.open(path) for path in checkpoints][-1]  # all are intact
    assert f"{word}\n    the same command goes on from step {newest.step}" in errors
    assert "Traceback" not in errors


def test_a_long_update_does_not_hold_up_the_end(interrupt):
    code, errors, seconds = interrupt(signal.SIGINT, "out/metrics.jsonl", "reasoning.yaml", *LARGE_UPDATE)
    assert code == 130
    assert seconds < 10
    assert "no checkpoint was written yet (runner.save_interval): the same command starts over" in errors
