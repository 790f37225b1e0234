"""The server calls `stop()` of a robot if the trainer, the server or a step dies, hangs or is interrupted."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from served import ROBOT, Record, Served
from waiting import until

from rl_platform.envs.embodied.remote import remote_workers
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError

SILENCE_S = 2.0
CONFIG = Path(__file__).parents[2] / "configs" / "embodied" / "cartpole.yaml"
TRAINER = """
import sys, time
import numpy as np
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv
address, token, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
envs = VectorEnv(EnvDescription("robot.py:Robot", max_episode_steps=10**6, addresses=(address,), token_file=token), 1)
envs.reset([0])
while True:
    result = envs.step(np.zeros((1, 1), np.float32))
    print(int(result.invalid[0]), result.failures, flush=True)
    time.sleep(pause)
"""


class Robot:
    """A server with the defaults of a robot, but for the silence and `arguments`."""

    def __init__(self, folder: Path, *arguments: str, **options: float | str) -> None:
        (folder / "robot.py").write_text(ROBOT)
        self.record, self._folder = Record(folder / "record"), folder
        kwargs = f'{{"record": "{self.record}"' + "".join(f', "{k}": {v}' for k, v in options.items()) + "}"
        given = ("--env", "robot.py:Robot", "--kwargs", kwargs, "--silence-s", str(SILENCE_S))
        self.server = Served(folder, *given, *arguments)
        self.trainer: subprocess.Popen[str] | None = None

    def train(self, pause: float = 0.05) -> subprocess.Popen[str]:
        """Starts a trainer and returns once it moves the robot."""
        token = str(self._folder / "token")
        command = [sys.executable, "-c", TRAINER, self.server.address, token, str(pause)]
        self.trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        until(lambda: self.record.words().count("step") > 3)
        return self.trainer

    def building(self, count: int) -> subprocess.Popen[str]:
        """Starts a trainer of `count` robots, which waits until they are built."""
        code = TRAINER.partition("envs.reset")[0].replace("), 1)", f"), {count}, 1)")
        command = [sys.executable, "-c", code, self.server.address, str(self._folder / "token"), "0"]
        return subprocess.Popen(command, text=True)

    def stopped_since(self, moment: float, seconds: float) -> float:
        """Waits at most `seconds` for a stop, and returns how long after `moment` it was."""
        until(lambda: "stop" in self.record.words() and self.record.last("stop") > moment, seconds)
        return self.record.last("stop") - moment

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.kill()
            self.trainer.wait()
        self.server.end()


@pytest.fixture
def robots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes) -> Callable[..., Robot]:
    """robots(*arguments, **options): a robot in the folder of the test, with which it ends."""
    monkeypatch.setattr(remote_workers, "_known", {})
    return lambda *arguments, **options: closes(Robot(tmp_path, *arguments, **options))


@pytest.fixture
def robot(robots: Callable[..., Robot]) -> Robot:
    return robots()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_trainer_dies(robot: Robot, number: int) -> None:
    trainer = robot.train()
    moment = time.monotonic()
    os.kill(trainer.pid, number)
    assert robot.stopped_since(moment, 30) < SILENCE_S
    until(lambda: robot.record.words()[-1] == "close")
    until(lambda: "has left" in robot.server.log.read_text())  # the robot can be used again
    robot.train()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_server_dies(robot: Robot, number: int) -> None:
    robot.train()
    moment = time.monotonic()
    os.kill(robot.server.pid, number)
    assert robot.stopped_since(moment, 30) < SILENCE_S


def test_the_server_ends_whichever_of_its_threads_gets_the_signal(robot: Robot) -> None:
    """The kernel gives a signal to any thread, Python handles it in the main thread alone."""
    robot.train()
    pid = robot.server.pid
    thread = max(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())
    assert thread != pid
    tgkill = 234 if platform.machine() == "x86_64" else 131
    assert ctypes.CDLL(None).syscall(tgkill, pid, thread, signal.SIGTERM) == 0
    assert robot.server.wait(20) == 0


def test_the_process_of_the_robot_gets_sigterm(robot: Robot) -> None:
    robot.train()
    moment = time.monotonic()
    os.kill(int(robot.record.lines()[-1][1]), signal.SIGTERM)
    assert robot.stopped_since(moment, 30) < SILENCE_S


def test_the_trainer_is_silent_and_goes_on(robot: Robot) -> None:
    """As after a lost network: the connection stays open without messages."""
    trainer = robot.train()
    os.kill(trainer.pid, signal.SIGSTOP)
    last = robot.record.last("step")
    assert SILENCE_S * 0.9 < robot.stopped_since(last, 30) < SILENCE_S + 2
    count = robot.record.words().count("stop")
    time.sleep(SILENCE_S)
    assert robot.record.words().count("stop") == count, "it is stopped once"
    steps = len(robot.record.lines())
    os.kill(trainer.pid, signal.SIGCONT)
    until(lambda: len(robot.record.lines()) > steps + 3)
    assert robot.record.words()[steps : steps + 2] == ["reset", "step"], "a new episode begins"
    trainer.kill()
    said = [line.split() for line in trainer.stdout.read().splitlines()]
    assert sum(invalid == "1" for invalid, _ in said) == 1, "one step, from before the pause, is left out"
    assert all(failures == "0" for _, failures in said)


def test_the_trainer_leaves_before_its_first_command(robot: Robot) -> None:
    """A robot may move as soon as it is built."""
    VectorEnv(robot.server.description("robot.py:Robot", max_episode_steps=100), 1).close()
    until(lambda: robot.record.words()[-2:] == ["stop", "close"])


def test_pauses_shorter_than_the_limit_change_nothing(robot: Robot) -> None:
    robot.train(pause=SILENCE_S / 4)
    assert "stop" not in robot.record.words()


@pytest.mark.parametrize("limited_by", ["the trainer", "the server"])
def test_a_step_that_hangs(limited_by: str, robots, caplog: pytest.LogCaptureFixture) -> None:
    of_server = limited_by == "the server"
    robot = robots(*(("--step-timeout-s", "1") if of_server else ()), hangs_at=3)
    description = robot.server.description("robot.py:Robot", max_episode_steps=100)
    with closing(VectorEnv(description, 1, step_timeout_s=60.0 if of_server else 1.0, restarts=1)) as envs:
        ends = "ends a step after 1 s (its --step-timeout-s); env.step_timeout_s is 60"
        assert any(ends in text for text in caplog.messages) == of_server
        envs.reset([0])
        results = [envs.step(np.zeros((1, 1), np.float32)) for _ in range(6)]
        hung = next(float(moment) for moment, _, word in reversed(robot.record.lines()[:4]) if word == "step")
        stops = [float(moment) for moment, _, word in robot.record.lines() if word == "stop"]
        assert 0.9 < stops[0] - hung < 3
        assert sum(result.failures for result in results) == 1
        assert [bool(result.invalid[0]) for result in results] == [False, False, True, True, False, False]


def test_a_robot_has_limits_of_its_own(robot: Robot, caplog: pytest.LogCaptureFixture) -> None:
    """Without options of the operator: one trainer, and steps of at most ten seconds."""
    description = robot.server.description("robot.py:Robot", max_episode_steps=100)
    with closing(VectorEnv(description, 1)):
        assert any("ends a step after 10 s (its --step-timeout-s)" in text for text in caplog.messages)
        with pytest.raises(ConfigError, match="2 environments in one connection; this server has 1"):
            VectorEnv(description, 2)


def test_a_step_that_continues_after_the_stop(robots) -> None:
    robot = robots(step_s=1.2)
    trainer = robot.train(pause=0.0)
    until(lambda: robot.record.words()[-1] == "step")
    trainer.kill()
    until(lambda: robot.record.words()[-1] == "close")
    words = robot.record.words()
    last = len(words) - words[::-1].index("step")
    moved = words.index("moved", last)
    assert "stop" in words[last:moved], "at once, during the step"
    assert {*words[moved + 1 : -1]} == {"stop"}, "again, perhaps more than once"


def test_a_robot_that_replaced_another_is_stopped(robots) -> None:
    robot = robots(raises_at=3)
    with closing(VectorEnv(robot.server.description("robot.py:Robot", max_episode_steps=100), 1, restarts=1)) as envs:
        envs.reset([0])
        for _ in range(5):
            envs.step(np.zeros((1, 1), np.float32))
        envs.close()
        until(lambda: robot.record.words()[-1] == "close" and robot.record.words().count("close") >= 3)
        assert robot.record.words()[-3:] == ["step", "stop", "close"]


def test_a_robot_whose_stop_calls_sys_exit_is_replaced_in_its_process(robots) -> None:
    robot = robots(raises_at=3, stop_exits=1)
    with closing(VectorEnv(robot.server.description("robot.py:Robot", max_episode_steps=100), 1, restarts=1)) as envs:
        envs.reset([0])
        results = [envs.step(np.zeros((1, 1), np.float32)) for _ in range(3)]
        assert [result.failures for result in results] == [0, 0, 1]
        first, second = (process for _, process, word in robot.record.lines() if word == "reset")
        assert first == second


def test_a_stop_that_hangs_ends_the_process(robots) -> None:
    robot = robots(stop_hangs=1)
    trainer = robot.train()
    os.kill(trainer.pid, signal.SIGSTOP)
    until(lambda: "has left" in robot.server.log.read_text(), 30)  # so that another one may be built
    assert robot.record.words()[-1] == "stop"


def test_a_stop_that_hangs_holds_no_other_robot_back(robots) -> None:
    robot = robots("--instances", "3", stop_hangs='"the first one"')
    with closing(VectorEnv(robot.server.description("robot.py:Robot", max_episode_steps=100), 3, 1)) as envs:
        envs.reset([0, 1, 2])
        envs.close()
        until(lambda: "has left" in robot.server.log.read_text(), 30)
        assert robot.record.words()[-3:] == ["stop"] * 3


def test_robots_are_stopped_while_another_is_built(robots) -> None:
    robot = robots("--instances", "3", built=3)  # one for the server's facts, and two of three
    building = robot.building(3)
    until(lambda: robot.record.words().count("built") == 4)
    building.kill()
    until(lambda: robot.record.words()[-2:] == ["stop", "stop"], 30)
    building.wait()


def test_a_signal_during_the_stop_of_a_robot_that_raised_ends_its_process(robots) -> None:
    robot = robots(raises_at=3, interrupted=1)
    with closing(VectorEnv(robot.server.description("robot.py:Robot", max_episode_steps=100), 1, restarts=2)) as envs:
        envs.reset([0])
        for _ in range(3):
            envs.step(np.zeros((1, 1), np.float32))
        until(lambda: "has left" in robot.server.log.read_text(), 30)
        words = robot.record.words()
        first = words.index("stop")
        assert words[first : first + 3] == ["stop", "stop", "close"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_is_killed_or_interrupted(robot: Robot, number: signal.Signals, tmp_path: Path, start) -> None:
    settings = {
        "env.id": "robot.py:Robot",
        "env.address": robot.server.address,
        "env.token_file": tmp_path / "token",
        "env.num_envs": 1,
        "env.num_workers": 1,
        "env.max_episode_steps": 1000,
        "env.evaluation.episodes": 1,
        "data.mini_batch_size": 64,
        "runner.max_steps": 10_000,
        "runner.output_dir": tmp_path / "run",
    }
    run, metrics = start(CONFIG, *(f"{key}={value}" for key, value in settings.items())), tmp_path / "run/metrics.jsonl"
    run.until(lambda: metrics.exists() and '"step": 2' in metrics.read_text())
    until(lambda: robot.record.words()[-1] == "step")
    run.send_signal(number)
    run.wait(60)
    moment = time.monotonic()
    until(lambda: robot.record.words()[-2:] == ["stop", "close"], 30)
    assert robot.record.last("stop") - moment < SILENCE_S


def test_the_run_ends(robot: Robot) -> None:
    envs = VectorEnv(robot.server.description("robot.py:Robot", max_episode_steps=100), 1)
    envs.reset([0])
    envs.step(np.zeros((1, 1), np.float32))
    moment = time.monotonic()
    envs.close()
    assert robot.stopped_since(moment, 30) < SILENCE_S
    until(lambda: robot.record.words()[-1] == "close")
