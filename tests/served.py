"""Environment servers as processes, from the file that users copy, and a robot that records its calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from waiting import until

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.remote import single_file

TOKEN = "a token for the tests only"
ROBOT = """
import os, signal, time
import gymnasium
import numpy as np

class Robot(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(
        self, record, hangs_at=None, raises_at=None, step_s=0.0, stop_hangs=False, stop_exits=False, interrupted=False,
        built=None,
    ):
        self.record, self.hangs_at, self.raises_at = record, hangs_at, raises_at
        self.step_s, self.stop_hangs, self.interrupted = step_s, stop_hangs, interrupted
        self.steps, self.closed, self.stop_exits = 0, False, stop_exits
        if built is not None:  # so many robots are built, the next one takes a minute
            self.note("built")
            if open(record).read().count("built") > built:
                time.sleep(60)

    def note(self, what):
        with open(self.record, "a") as file:
            file.write(f"{time.monotonic()} {os.getpid()} {what}\\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.note("step")
        if self.steps == self.hangs_at and not os.path.exists(self.record + ".hung"):
            open(self.record + ".hung", "w").close()
            time.sleep(600)
        if self.steps == self.raises_at:
            raise OSError("the arm is not plugged in")
        if self.step_s:
            time.sleep(self.step_s)
            self.note("moved")
        return np.full(2, 0.1 * float(action[0]), np.float32), 1.0, False, False, {}

    def stop(self):
        self.note("stop" if not self.closed else "stop-after-close")
        if self.interrupted and not os.path.exists(self.record + ".interrupted"):
            open(self.record + ".interrupted", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        if self.stop_exits:
            raise SystemExit("the brake is stuck")
        if self.stop_hangs == "the first one":
            try:
                os.close(os.open(self.record + ".hangs", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if self.stop_hangs:
            time.sleep(600)

    def close(self):
        self.closed = True
        self.note("close")
"""


class Served:
    """A server in `folder`, at `address`."""

    def __init__(self, folder: Path, *arguments: str, python: str = sys.executable, port: int = 0) -> None:
        file, token = folder / "server.pyz", folder / "token"
        if not file.exists():
            single_file.write(file)
            token.write_text(TOKEN)
            token.chmod(0o600)
        command = [python, str(file), "--token-file", str(token), "--port", str(port), *arguments]
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        until(lambda: "env.address=" in self.log.read_text() or self._process.poll() is not None)
        assert self._process.poll() is None, self.log.read_text()
        self.address = self.log.read_text().partition("env.address=")[2].split()[0]
        self.port = int(self.address.rpartition(":")[2])
        self._token = token

    @property
    def pid(self) -> int:
        return self._process.pid

    def description(self, env_id: str, **options: object) -> EnvDescription:
        return EnvDescription(env_id, addresses=(self.address,), token_file=str(self._token), **options)

    def close(self) -> None:
        self.end()

    def end(self, number: int = signal.SIGTERM) -> int:
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        return self.wait(20)

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)


class Record:
    """The record of a robot: each line has a time, a process and a word."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def words(self) -> list[str]:
        return [word for _, _, word in self.lines()]

    def last(self, what: str) -> float:
        return max(float(moment) for moment, _, word in self.lines() if word == what)
