"""The runs of a rehearsal, each a process of its own: two steps, a kill, a resume.

They go through the command's normal entry, so checks, runtime, checkpoints and exit codes are those of a run. A guard
kills a run if this process dies.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_platform.errors import PlatformError
from rl_platform.runtime.child import Child, Death

_PROGRAM = """
import sys
sys.argv = ["platform-launch", *sys.argv[2:]]
from rl_platform.launch.cli import main
main()
"""
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
POLL_S = 0.005
GONE_S = 10.0  # in which no process of a killed run may be left
SHOWN = 40  # lines of a failed run's output


class RunFailed(PlatformError):
    """A run of the rehearsal ended with an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Timed:
    """A phase of the rehearsal and its seconds."""

    name: str
    seconds: float


class Runs:
    """Starts runs of the small config in `folder`; output is written to log.txt there."""

    def __init__(self, folder: Path, config: Path, deadline_s: float) -> None:
        self.folder, self.config, self.deadline_s = folder, config, deadline_s
        self.output = folder / "run"
        self.log = folder / "log.txt"

    def until_killed(self) -> tuple[float, float, int]:
        """Runs until the first checkpoint is written, then sends SIGKILL.

        Returns the seconds of the run, the seconds until all of its processes were gone, and their number. Raises
        RunFailed if it ends before, or if a process is left.
        """
        began = time.monotonic()
        with self._started() as child:
            while not self._checkpoints():
                if child.ends_within(POLL_S):
                    self._raise(child, "before its first checkpoint")
                self._check_time(child, began)
            ran, processes = time.monotonic() - began, _tree(child.pid)
            child.kill()
            killed = time.monotonic()
            left = psutil.wait_procs(processes, GONE_S)[1]
        if left:
            names = ", ".join(f"{process.pid} {_name(process)}" for process in left)
            _end(left)
            raise RunFailed(f"processes outlived a killed run by {GONE_S:g} s: {names}", 70)
        for extra in self._checkpoints()[1:]:  # the run was faster than the kill
            shutil.rmtree(extra)
        return ran, time.monotonic() - killed, len(processes)

    def to_the_end(self) -> float:
        """Runs the rest and returns the seconds. Raises RunFailed."""
        began = time.monotonic()
        with self._started() as child:
            while not child.ends_within(0.1):
                self._check_time(child, began)
            if child.exit_reason() != "exit code 0":
                self._raise(child, "when it was resumed")
        return time.monotonic() - began

    def metrics(self) -> list[dict[str, float]]:
        """Returns the metrics of all steps."""
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    @contextmanager
    def _started(self) -> Iterator[Child]:
        with self.log.open("ab") as log:
            child = Child(_PROGRAM, Death.GUARD, [self.config], ENVIRONMENT, output=log)
            try:
                yield child
            finally:
                processes = [] if child.ended else _tree(child.pid)
                child.kill()
                _end(psutil.wait_procs(processes, 3.0)[1])

    def _checkpoints(self) -> list[Path]:
        return sorted(path.parent for path in self.output.glob("checkpoints/step-*/manifest.json"))

    def _check_time(self, child: Child, began: float) -> None:
        if time.monotonic() - began > self.deadline_s:
            raise RunFailed(f"no end after {self.deadline_s:g} s\n{self._tail()}", 75)

    def _raise(self, child: Child, when: str) -> None:
        reason = child.exit_reason()
        code = int(reason.removeprefix("exit code ")) if reason.startswith("exit code ") else 70
        raise RunFailed(f"the small run ended {when} ({reason}):\n{self._tail()}", code or 70)

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-SHOWN:]
        return "\n".join(f"    {line}" for line in lines)


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.children(recursive=True)
    return []


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return "?"


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GONE_S)
