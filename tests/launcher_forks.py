"""`platform-launch` as forks of one process, which has imported for all of them. No test by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from forks import PATH, Fork, Forking, Job
from waiting import HANG_S, until

T = TypeVar("T")
LAUNCH = "from rl_platform.launch.cli import main; main()"
STOP_AT = "from launcher_forks import stop_at; stop_at({!r})\n"
FORK_WORKERS = "from ray_forks import fork_workers; setattr(*fork_workers())\n"


class Launcher(Fork):
    """The leader of a session, with more methods of `subprocess.Popen`. out, err: the files that it appends to."""

    def __init__(self, path: str, job: Job, descriptors: Mapping[int, int], out: Path, err: Path) -> None:
        super().__init__(path, job, descriptors)
        self.out, self.err = out, err

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = 4 * HANG_S) -> int:
        """Its exit code, negative for a signal."""
        return super().wait(timeout)

    def until(self, condition: Callable[[], T]) -> T:
        """Returns what `condition` returns as soon as that is true; fails once the launcher has ended."""

        def met() -> T:
            assert self.poll() is None, self.err.read_text()
            return condition()

        return until(met, 4 * HANG_S)

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

    def __enter__(self) -> Launchers:
        self._forking = Forking(self._process)
        self._outputs, self._count = TemporaryDirectory(), 0
        return self

    @staticmethod
    def _process(descriptor: int) -> subprocess.Popen[bytes]:
        preload = f"import sys; sys.path.insert(0, {os.path.dirname(PATH)!r}); from launcher_forks import preload; "
        command = [sys.executable, "-W", "ignore", PATH, str(descriptor), f"{preload}preload(); del sys.path[0]"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[descriptor])

    def __exit__(self, *_: object) -> None:
        self._forking.close()
        self._outputs.cleanup()

    def start(
        self,
        folder: Path,
        *words: str,
        output: Path | None = None,
        code: str = LAUNCH,
        stops_at: str = "",
        forked_workers: bool = False,
        descriptors: Mapping[int, int] | None = None,
    ) -> Launcher:
        """Starts `platform-launch` with these words in the folder.

        output: a file for both streams. stops_at: a launcher stops itself when it has renamed something to a path that
        matches. forked_workers: of a Ray that the run starts; the test has the fixture of this name. descriptors:
        further ones, by their numbers in the launcher.
        """
        own, self._count = Path(self._outputs.name, str(self._count)), self._count + 1
        out, err = (output, output) if output else (own.with_suffix(".out"), own.with_suffix(".err"))
        code = (STOP_AT.format(stops_at) if stops_at else "") + (FORK_WORKERS if forked_workers else "") + code
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        job = Job(code=code, arguments=["platform-launch", *words], environment=environment, folder=str(folder))
        with open(os.devnull) as nothing, out.open("a") as written, err.open("a") as errors:
            streams = {0: nothing.fileno(), 1: written.fileno(), 2: errors.fileno()}
            return Launcher(self._forking.path, job, {**streams, **(descriptors or {})}, out, err)


def stop_at(pattern: str) -> None:
    rename = os.rename

    def stopping(source: str, target: str) -> None:
        rename(source, target)
        if Path(target).match(pattern):
            os.kill(os.getpid(), signal.SIGSTOP)

    os.rename = stopping  # type: ignore[assignment]


def import_for_runs() -> None:
    """Imports what runs use, before they are forked."""
    import torch.distributed.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from numba.core.registry import cpu_target

    from rl_platform.accel import decode_kernel, tensor_loops  # noqa: F401
    from rl_platform.launch import cli, session  # noqa: F401 - what every launcher imports
    from rl_platform.launch.start_checks import every_check  # noqa: F401 - and what every start does
    from rl_platform.runners import embodied, reasoning  # noqa: F401

    cpu_target.typing_context.refresh()  # numba would otherwise import its library with the first compiled function
    cpu_target.target_context.refresh()


def preload() -> None:
    """Imports for launchers, and the modules of these tests that they use."""
    import ray_forks  # noqa: F401

    import_for_runs()
