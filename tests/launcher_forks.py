"""`platform-launch` as forks of one process, which has imported for all of them. No test by itself.

`main` reads lines of JSON, the fields of `Job`, and prints the process id of each launcher that it starts. A process of
its own waits for the launcher's end and writes the wait status to a file.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from ray_forks import fork_workers
from waiting import HANG_S

LAUNCH = "from rl_platform.launch.cli import main; main()"


@dataclass(frozen=True)
class Job:
    """out, err: files to append to. status: a file that the end of the launcher writes. stops_at: a launcher stops
    itself when it has renamed something to a path that matches. forked_workers: of a Ray that the run starts; the test
    has the fixture of this name."""

    folder: str
    words: tuple[str, ...]
    code: str
    environment: dict[str, str]
    out: str
    err: str
    status: str
    stops_at: str
    forked_workers: bool


class Launcher:
    """The leader of a session, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, job: Job) -> None:
        self.pid, self.out, self.err, self._status = pid, Path(job.out), Path(job.err), Path(job.status)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._status.exists():
            self.returncode = os.waitstatus_to_exitcode(int(self._status.read_text()))
        return self.returncode

    def wait(self, timeout: float = 4 * HANG_S) -> int:
        """Its exit code, negative for a signal."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"it did not end within {timeout} s"
            time.sleep(0.02)  # it may train for minutes
        return code

    def communicate(self, timeout: float = 4 * HANG_S) -> tuple[str, str]:
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def send_signal(self, number: signal.Signals, group: bool = False) -> None:
        """group: to its children in its process group, too, as a terminal does. Nothing happens after its end."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launchers:
    """A process that forks launchers; leave the block and it is gone."""

    def __init__(self) -> None:
        pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__]
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._ends, self._count = TemporaryDirectory(), 0

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._ends.cleanup()

    def start(
        self,
        folder: Path,
        *words: str,
        output: Path | None = None,
        code: str = LAUNCH,
        stops_at: str = "",
        forked_workers: bool = False,
    ) -> Launcher:
        """Starts `platform-launch` with these words in the folder. output: a file for both streams."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        own, self._count = Path(self._ends.name, str(self._count)), self._count + 1
        out, err = (output, output) if output else (own.with_suffix(".out"), own.with_suffix(".err"))
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        job = Job(str(folder), words, code, environment, str(out), str(err), str(own), stops_at, forked_workers)
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        return Launcher(int(self.process.stdout.readline()), job)


def _stop_at(pattern: str) -> None:
    rename = os.rename

    def stopping(source: str, target: str) -> None:
        rename(source, target)
        if Path(target).match(pattern):
            os.kill(os.getpid(), signal.SIGSTOP)

    os.rename = stopping  # type: ignore[assignment]


def _watch(pid: int, status: Path) -> None:
    """Waits for the end of a child process; this process has no other task."""
    os.write(1, f"{pid}\n".encode())
    part = status.with_suffix(".part")
    part.write_text(str(os.waitpid(pid, 0)[1]))
    part.rename(status)
    os._exit(0)


def _become(job: Job) -> None:
    """This process, a fork, gets the folder, environment, streams and signals of a process of its own."""
    os.setsid()
    os.chdir(job.folder)
    for name in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[0:1] = ["", *filter(None, job.environment.get("PYTHONPATH", "").split(os.pathsep))]
    for descriptor, path in ((1, job.out), (2, job.err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    opened = os.open(os.devnull, os.O_RDONLY)
    os.dup2(opened, 0)
    os.close(opened)
    sys.argv = ["platform-launch", *job.words]
    if job.stops_at:
        _stop_at(job.stops_at)
    if job.forked_workers:
        setattr(*fork_workers())


def _run(code: str) -> NoReturn:
    """Runs a program and ends this process as the interpreter does, but leaves its modules to the kernel.

    The interpreter would clear every module, for which a fork copies all of its memory.
    """
    status = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    leave(status)


def leave(status: int) -> NoReturn:
    """Waits for threads, calls what is registered for the end and collects garbage; `sys.exit` would do so, too."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def import_for_runs() -> None:
    """Imports what runs use, before they are forked."""
    import torch.distributed.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from numba.core.registry import cpu_target

    from rl_platform.accel import decode_kernel, tensor_loops  # noqa: F401
    from rl_platform.runners import embodied, reasoning  # noqa: F401

    cpu_target.typing_context.refresh()  # numba would otherwise import its library with the first compiled function
    cpu_target.target_context.refresh()


def main() -> None:
    from rl_platform.launch import cli, session  # noqa: F401 - what every launcher imports
    from rl_platform.launch.start_checks import every_check  # noqa: F401 - and what every start does

    import_for_runs()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that watch
    for line in sys.stdin:
        fields = json.loads(line)
        job = Job(**fields)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if pid := os.fork():
                _watch(pid, Path(job.status))
            _become(job)
            _run(job.code)


if __name__ == "__main__":
    main()
