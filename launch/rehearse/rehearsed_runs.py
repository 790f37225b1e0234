"""The runs of a rehearsal, each a process of its own: two steps, a kill, a resume."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_platform.errors import PlatformError
from rl_platform.launch.tools.run_process import GONE_S, descendants, end_processes, end_run, start_run
from rl_platform.metrics import read_metrics
from rl_platform.run_files import complete_checkpoints
from rl_platform.runtime.child import Child

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
POLL_S = 0.02
LONGEST_TMPDIR = 60  # characters: engines make sockets there, whose paths are short
SHOWN = 40  # lines of a failed run's output
SAMPLE_S = 0.5  # between two readings of the processes' CPU times


class RunFailed(PlatformError):
    """A run of the rehearsal ended with an exit code. output: what it printed."""

    def __init__(self, message: str, exit_code: int, output: str = "") -> None:
        super().__init__(message)
        self.exit_code, self.output = exit_code, output


@dataclass(frozen=True)
class Timed:
    """A phase of the rehearsal and its seconds."""

    name: str
    seconds: float


class CpuSeconds:
    """CPU seconds of this process and of all processes below it, read every `SAMPLE_S` while it is entered.

    Ray does not wait for its workers, so no sum of the kernel has their times. The seconds after the last reading of a
    process are missing.
    """

    def __init__(self) -> None:
        self._read: dict[psutil.Process, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="CPU seconds", daemon=True)

    def __enter__(self) -> CpuSeconds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def total(self) -> float:
        """Returns the seconds since each process began."""
        return time.process_time() + sum(self._read.values())

    def read(self) -> None:
        """Reads the times of the processes that run now."""
        for process in descendants(os.getpid()):
            with suppress(psutil.Error):
                used = process.cpu_times()
                self._read[process] = used.user + used.system

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.read()


class Runs:
    """Starts runs of `config` in `folder`, which write to `output`. A failed run copies what it printed to `kept`.

    cpu: reads the CPU times before a kill.
    """

    def __init__(self, folder: Path, deadline_s: float, kept: Path, cpu: CpuSeconds) -> None:
        self.folder, self.deadline_s, self.kept, self.cpu = folder, deadline_s, kept, cpu
        with suppress(OSError):
            kept.unlink()  # of an earlier rehearsal
        self.config, self.output, self.log = folder / "config.yaml", folder / "run", folder / "log.txt"
        self._environment = dict(ENVIRONMENT)
        temporary = folder / "tmp"  # a killed run leaves files of its engines there
        if len(str(temporary)) <= LONGEST_TMPDIR:
            temporary.mkdir()
            with suppress(KeyError, OSError):  # a user without a name
                compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # torch's default, which stays
                self._environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)
            self._environment["TMPDIR"] = str(temporary)

    def until_killed(self) -> None:
        """Runs from the start until the first checkpoint is written, then sends SIGKILL.

        Raises RunFailed if it ends before, or if a process is left.
        """
        shutil.rmtree(self.output, ignore_errors=True)
        began = time.monotonic()
        with self._started() as child:
            while not self._checkpoints():
                if child.ends_within(POLL_S):
                    self._raise(child, "before its first checkpoint")
                self._check_time(child, began)
            processes = descendants(child.pid)
            self.cpu.read()
            child.kill()
            left = psutil.wait_procs(processes, GONE_S)[1]
        if left:
            names = ", ".join(f"{process.pid} {_name(process)}" for process in left)
            end_processes(left)
            raise RunFailed(f"processes outlived a killed run by {GONE_S:g} s: {names}", 70)
        for extra in self._checkpoints()[1:]:  # the run was faster than the kill
            shutil.rmtree(extra)

    def to_the_end(self) -> None:
        """Runs the rest. Raises RunFailed."""
        began = time.monotonic()
        with self._started() as child:
            while not child.ends_within(0.1):
                self._check_time(child, began)
            if child.exit_reason() != "exit code 0":
                self._raise(child, "when it was resumed")

    def inside(self) -> list[Timed]:
        """Returns the seconds of the phases inside the runs, over all steps."""
        seconds: dict[str, float] = {}
        for step in self.metrics():
            for name, value in step.items():
                if name.startswith("time/") and name != "time/step":
                    seconds[name.removeprefix("time/")] = seconds.get(name.removeprefix("time/"), 0.0) + value
        return [Timed(name, value) for name, value in seconds.items()]

    def metrics(self) -> list[dict[str, float]]:
        """Returns the metrics of all steps."""
        return read_metrics(self.output)

    @contextmanager
    def _started(self) -> Iterator[Child]:
        child = start_run([self.config], self._environment, self.log)
        try:
            yield child
        finally:
            end_run(child)

    def _checkpoints(self) -> list[Path]:
        return [*complete_checkpoints(self.output / "checkpoints").values()]

    def _check_time(self, child: Child, began: float) -> None:
        if time.monotonic() - began > self.deadline_s:
            raise self._failed(f"no end after {self.deadline_s:g} s", 75)

    def _raise(self, child: Child, when: str) -> None:
        reason = child.exit_reason()
        code = int(reason.removeprefix("exit code ")) if reason.startswith("exit code ") else 70
        raise self._failed(f"the small run ended {when} ({reason})", code or 70)

    def _failed(self, message: str, code: int) -> RunFailed:
        output = self.log.read_text(errors="replace")
        with suppress(OSError):
            self.kept.write_text(output, encoding="utf-8")
            message += f"; all that it printed is in {self.kept}"
        lines = [f"    {line}" for line in output.splitlines()[-SHOWN:]]
        return RunFailed("\n".join([f"{message}:", *lines]), code, output)


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        name: str = process.name()
        return name
    return "?"
