"""A run as a child process: `platform-launch` in an interpreter of its own, and the end of all that it started.

The run goes through the command's normal entry, so checks, runtime, checkpoints and exit codes are the same. A guard
kills it if this process dies. Not covered: deadlines, and what a caller makes of the exit code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from rl_platform.runtime.child import Child, Death

_PROGRAM = """
import sys
sys.argv = ["platform-launch", *sys.argv[2:]]
from rl_platform.launch.cli import main
main()
"""
LEFT_S = 3.0  # for the processes of a killed run to end by themselves
GONE_S = 30.0  # in which no process of a killed run may be left


def start_run(arguments: Sequence[object], environment: Mapping[str, str], log: Path) -> Child:
    """Starts `platform-launch *arguments`; what it prints is added to the file `log`."""
    with log.open("ab") as output:
        return Child(_PROGRAM, Death.GUARD, arguments, environment, output=output)


def ask_to_stop(run: Child) -> None:
    """Sends SIGTERM: the run saves at the end of its step, within `runner.stop_grace_s`, and ends."""
    if not run.ended:
        os.kill(run.pid, signal.SIGTERM)


def end_run(run: Child) -> None:
    """Kills a run and what is left of the processes below it. After its end it does nothing."""
    left = [] if run.ended else descendants(run.pid)
    run.kill()
    end_processes(psutil.wait_procs(left, LEFT_S)[1])


def descendants(pid: int) -> list[psutil.Process]:
    """Returns all processes below a process."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        below: list[psutil.Process] = process.children(recursive=True)
        return below
    return []


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kills processes and waits for their end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, GONE_S)


def last_lines(log: Path, count: int, begin: int = 0) -> list[str]:
    """Returns the last lines of a log, from byte `begin` on."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").rstrip().splitlines()[-count:]
    return []
