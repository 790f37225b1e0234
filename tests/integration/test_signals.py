"""Ctrl-C, SIGTERM, SIGHUP: the step is saved, or a prompt end; a clear message, no process left, never a traceback."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from launcher_forks import Launcher
from waiting import HANG_S, assert_gone, until

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.metrics import read_metrics

CODE = "from rl_platform.launch.cli import main; main()"
REASONING, EMBODIED = ("reasoning.yaml",), ("embodied.yaml", "env.num_workers=2")
ENDLESS = "runner.max_steps=100000", "runner.save_interval=0"
LARGE_UPDATE = "reasoning.yaml", "runner.max_steps=100000", "algorithm.ppo_epochs=1000000"
CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def started_processes_heed_sighup() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, and child processes inherit that; they do not inherit a handler."""
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, before)


@dataclass(frozen=True)
class Stopped:
    code: int
    out: str
    err: str
    seconds: float  # from the first signal to the end


class Run:
    """A launched command that leads a process group; a terminal's signals go to the whole group."""

    def __init__(self, folder: Path, process: Launcher) -> None:
        self.folder, self.process, self._out, self._err = folder, process, process.out, process.err

    def wait_for(self, pattern: str, present: Callable[[Path], bool] = lambda path: path.stat().st_size > 0) -> Run:
        self.process.until(lambda: any(present(path) for path in self.folder.glob(pattern)))
        return self

    def steps(self, count: int) -> Run:
        """Returns once so many lines of metrics are written, that of step 0 included."""
        return self.wait_for("out/metrics.jsonl", lambda path: len(path.read_text().splitlines()) >= count)

    def send(self, *numbers: signal.Signals, pause: float = 0.5) -> Stopped:
        """Signals with a pause after the answer to the first; no child process is left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        began = time.monotonic()
        for count, number in enumerate(numbers):
            if count:
                until(lambda: "stopping after step" in self._out.read_text())
                time.sleep(pause)
            self.process.send_signal(number, group=number != signal.SIGTERM)  # a batch system's is for the launcher
        self.process.wait(2 * HANG_S)
        out, err = self._out.read_text(), self._err.read_text()
        seconds = time.monotonic() - began
        assert_gone(children)
        assert "Traceback" not in out + err
        return Stopped(self.process.returncode, out, err, seconds)


@pytest.fixture
def group(folder: Path, start: Callable[..., Launcher]) -> Callable[..., Run]:
    return lambda *arguments: Run(folder, start(*arguments))


def newest(folder: Path) -> Checkpoint:
    return [Checkpoint.open(path) for path in sorted(folder.glob("out/checkpoints/step-*"))][-1]  # all are intact


@pytest.mark.parametrize(
    ("task", "number", "code"),
    [(REASONING, *CODES[0]), (EMBODIED, *CODES[0]), (REASONING, *CODES[1]), (EMBODIED, *CODES[2])],
)
def test_a_signal_saves_the_step(
    group, command, folder: Path, task, number: signal.Signals, code: int, final_state, logged, differences
):
    ended = group(*task, *ENDLESS).steps(3).send(number)
    assert ended.code == code
    step = newest(folder).step
    assert read_metrics(folder / "out")[-1]["step"] == step
    assert f"stopping after step {step}" in ended.out
    assert ("press Ctrl-C again to leave now" in ended.out) == (number == signal.SIGINT)
    assert f"the same command goes on from step {step}" in ended.err
    if number == signal.SIGINT:  # the run that goes on equals an undisturbed one
        more = f"runner.max_steps={step + 3}"
        assert command(*task, more).code == 0
        assert command(*task, more, "runner.output_dir=whole").code == 0
        assert differences(final_state("out", step + 3), final_state("whole", step + 3)) == []
        assert str(logged("out")) == str(logged("whole"))  # as text, because NaN differs from itself


VALIDATES = "runner.val_check_interval=1", "env.evaluation.episodes=300"  # nearly all of its time


@pytest.mark.parametrize(
    ("settings", "number", "code"), [(VALIDATES, *CODES[0]), (["runner.save_interval=1"], *CODES[1])]
)
def test_a_signal_during_a_validation_or_a_save_saves_the_step(
    group, folder: Path, settings, number: signal.Signals, code: int
):
    ended = group("embodied.yaml", "runner.max_steps=100000", *settings).steps(3).send(number)
    assert ended.code == code, ended.err
    assert read_metrics(folder / "out")[-1]["step"] == newest(folder).step


@pytest.mark.parametrize(  # test_ray_runs.py sends SIGTERM
    ("number", "code"), [CODES[0], pytest.param(*CODES[2], marks=pytest.mark.release)]
)
def test_a_signal_to_the_group_saves_the_step_on_ray(group, folder: Path, number: signal.Signals, code: int):
    placement = "cluster.component_placement={actor_critic: 0, 'env,rollout': 1}"
    devices = "cluster.devices_per_node=2", "env.num_workers=1"
    ended = group("embodied.yaml", *ENDLESS, placement, *devices).steps(3).send(number)
    assert ended.code == code, ended.err
    assert f"the same command goes on from step {newest(folder).step}" in ended.err


@pytest.mark.parametrize(("count", "pause"), [(2, 0.5), (6, 0.2)], ids=["twice", "while it shuts down"])
def test_a_second_interrupt_leaves_a_long_update(group, count: int, pause: float):
    ended = group(*LARGE_UPDATE).steps(1).send(*[signal.SIGINT] * count, pause=pause)
    assert ended.code == 130  # the update would last for days
    assert "stopping after step 1, press Ctrl-C again to leave now" in ended.out
    assert (
        count > 2 or "no checkpoint was written yet (runner.save_interval): the same command starts over" in ended.err
    )


@pytest.mark.parametrize(("number", "code"), CODES[1:])
def test_a_long_update_holds_up_the_end_for_the_grace_period_only(group, number: signal.Signals, code: int):
    ended = group(*LARGE_UPDATE, "runner.stop_grace_s=2").steps(1).send(number, number)
    assert ended.code == code
    assert ended.seconds > 2
    assert "stopping after step 1, at most 2 s from now (runner.stop_grace_s)" in ended.out


SLOW_SCORE = """
import time
from pathlib import Path

def score(response, answer, metadata):
    Path("WORKING").touch()
    time.sleep(0.6)
    return float(len(response) % 3)
"""
SLOW_ENV = """
import time
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def step(self, action):
        Path("WORKING").touch()
        time.sleep(0.15)
        return super().step(action)
"""
SCORED = "reasoning.yaml", "reward.type=slow_score.py:score", "data.train_batch_size=4", "data.val_size=2"
STEPPED = "embodied.yaml", "env.id=slow_env.py:Slow", "env.num_envs=2", "env.num_workers=2", "env.max_episode_steps=8"


@pytest.mark.parametrize(("task", "number", "code"), [(SCORED, *CODES[1]), (STEPPED, *CODES[2])])
def test_a_rollout_longer_than_the_grace_period_is_dropped_and_the_step_before_it_saved(
    group, command, folder: Path, task, number: signal.Signals, code: int, final_state, logged, differences
):
    working = folder / "working"
    for name, content in (("slow_score.py", SLOW_SCORE), ("slow_env.py", SLOW_ENV)):
        (folder / name).write_text(content.replace("WORKING", str(working)))
    run = group(*task, *ENDLESS, "runner.stop_grace_s=1").steps(3)
    working.unlink()  # that of step 2, which may not have ended
    ended = run.wait_for("working", lambda path: True).send(number)
    assert ended.code == code, ended.err
    step = newest(folder).step
    assert step == read_metrics(folder / "out")[-1]["step"] == 2
    assert "step 3 is dropped, because it does not end within runner.stop_grace_s: saving step 2" in ended.out
    assert "the same command goes on from step 2" in ended.err
    more = "runner.max_steps=3"
    assert command(*task, more).code == 0
    assert command(*task, more, "runner.output_dir=whole").code == 0
    assert differences(final_state("out", 3), final_state("whole", 3)) == []
    assert str(logged("out")) == str(logged("whole"))


def test_without_a_grace_period_sigterm_ends_the_run_at_once(group):
    ended = group(*LARGE_UPDATE, "runner.stop_grace_s=0").steps(1).send(signal.SIGTERM)
    assert ended.code == 143


def test_nohup_and_background_jobs_keep_their_ignored_signals(folder: Path):
    line = f"trap '' HUP INT; exec {sys.executable} -c '{CODE}' embodied.yaml runner.max_steps=40"
    run = subprocess.Popen(["bash", "-c", line], cwd=folder, stdout=subprocess.DEVNULL)
    until(lambda: (folder / "out/metrics.jsonl").exists() or run.poll() is not None, 2 * HANG_S)
    run.send_signal(signal.SIGHUP)
    run.send_signal(signal.SIGINT)
    assert run.wait(2 * HANG_S) == 0


TAKEN_BY_ANOTHER_THREAD = """
import os, signal, threading
from rl_platform.interrupts import Interrupted, handle_signals, shutting_down
handle_signals()
open_files = os.listdir("/proc/self/fd")
handle_signals()
assert os.listdir("/proc/self/fd") == open_files
taken = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
with shutting_down():
    threading.Timer(0.5, taken).start()
    try:
        threading.Event().wait()
    except Interrupted as error:
        print(error)
"""


def test_a_signal_that_another_thread_gets_ends_what_the_main_thread_waits_for() -> None:
    ended = subprocess.run([sys.executable, "-c", TAKEN_BY_ANOTHER_THREAD], capture_output=True, timeout=HANG_S)
    assert (ended.stdout, ended.stderr) == (b"terminated\n", b"")


START = """
from rl_platform.launch import cli
handle_signals = cli.handle_signals
cli.handle_signals = lambda: (handle_signals(), print("ready", flush=True))
cli.main()
"""


@pytest.mark.parametrize("moment", [0, pytest.param(1.0, marks=pytest.mark.release), 3.0])
def test_an_interrupt_during_the_start_is_quiet_and_prompt(folder: Path, moment: float):
    """At moments, in seconds, between the first line of the entry point and the first step."""
    command, pipe = [sys.executable, "-c", START, "embodied.yaml", *ENDLESS], subprocess.PIPE
    for _ in range(3):  # other work on this machine may slow down one of them
        process = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(moment)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, err
        assert "Traceback" not in out + err
        assert "interrupted" in err
        if time.monotonic() - began < 5:
            return
    pytest.fail("none of three ended in 5 s")


def test_a_terminal_that_is_closed_ends_a_saved_run(folder: Path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "-c", CODE, "embodied.yaml", *ENDLESS])
    run, seen = psutil.Process(pid), b""
    metrics = folder / "out/metrics.jsonl"
    try:
        while b"step" not in seen or not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            seen += os.read(terminal, 65536)
        os.close(terminal)  # the kernel sends SIGHUP
        assert run.wait(HANG_S) == 129
    finally:
        if run.is_running():
            run.kill()
    assert read_metrics(folder / "out")[-1]["step"] == newest(folder).step
