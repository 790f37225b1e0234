"""Ray's workers as forks of one process, which has imported for all of them. No test by itself.

A worker imports for three seconds, and tests start hundreds of them. A node of Ray that starts in the block of
`RayForks.start_workers` runs this file to start a worker: it gives its words, environment and streams to the process
that forks, and ends. Commands that tests start as processes of their own have Ray's usual workers, unless a test sets
`forked_workers` (tests/launcher_forks.py). Ray does not end a fork that is stopped.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # launcher_forks imports this module
    from launcher_forks import Launchers

SOCKET = "RL_PLATFORM_TEST_RAY_FORKS"
# Packages that Ray's workers import. They take half of the time of `import ray`. Ray itself is not among them.
IMPORTED_BY_RAY = (
    *("cloudpickle", "google.protobuf.internal.builder", "jsonschema", "msgpack", "pdb", "pydantic.v1", "requests"),
    *("pyarrow", "rl_platform.runtime.lifecycle", "tracemalloc", "wcwidth", "xxhash"),
)
LANGUAGE, CONTEXT = "--language=", "--serialized-runtime-env-context="


class RayForks:
    """The process that forks, itself a fork of the process of `launchers`; leave the block and it is gone."""

    def __init__(self, launchers: Launchers) -> None:
        self._launchers = launchers

    def __enter__(self) -> RayForks:
        self._folder = TemporaryDirectory(dir="/tmp")
        self.path = str(Path(self._folder.name, "socket"))
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from ray_forks import main; main()"
        self._process = self._launchers.start(Path("/tmp"), self.path, code=code)
        while not os.path.exists(self.path):
            assert self._process.poll() is None, self._process.communicate()[1]
            time.sleep(0.02)
        self._alive = socket.socket(socket.AF_UNIX)
        self._alive.connect(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._alive.close()
        self._folder.cleanup()

    def workers(self) -> set[Any]:
        """Returns the present workers, as processes of psutil."""
        import psutil  # here, as each worker runs this file first

        return set(psutil.Process(self._process.pid).children(recursive=True))

    @contextmanager
    def start_workers(self) -> Iterator[None]:
        """Of every node of Ray that this process starts in the block."""
        import pytest  # here, too

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SOCKET, self.path)
            patch.setattr(*fork_workers())
            yield


def fork_workers() -> tuple[Any, str, Any]:
    """Returns an attribute of Ray and its value, with which workers of nodes that this process starts are forks.

    The environment holds `SOCKET`.
    """
    from ray._private.parameter import RayParams

    update = RayParams.update_if_absent

    def with_forks(params: RayParams, **values: Any) -> None:
        update(params, **values | ({"setup_worker_path": __file__} if "setup_worker_path" in values else {}))

    return RayParams, "update_if_absent", with_forks


def ask(words: list[str]) -> None:
    """Asks for a fork that is the worker of these words. Ray starts it itself if it has an environment of its own."""
    context = next((word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)), "{}")
    if json.loads(context).get("env_vars") or f"{LANGUAGE}PYTHON" not in words:
        os.execv(sys.executable, [sys.executable, "-m", "ray._private.workers.setup_worker", *words])
    words = [word for word in words if not word.startswith((LANGUAGE, CONTEXT))]
    blocked = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps([words, dict(os.environ), os.getcwd(), blocked]).encode())


def main() -> None:
    """Imports what Ray's workers need, then forks them. Its argument is the path of the socket."""
    for name in IMPORTED_BY_RAY:
        importlib.import_module(name)
    assert "ray" not in sys.modules, "it reads its settings from the environment when it is imported"
    gc.collect()
    gc.freeze()
    path = sys.argv[1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".part")
        listener.listen(128)
        os.rename(path + ".part", path)
        test_process, _ = listener.accept()
        serve(listener, test_process)


def serve(listener: socket.socket, test_process: socket.socket) -> None:
    """Forks workers until the test process has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, test_process], [], [])
        if test_process in ready:
            return
        connection, _ = listener.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as file:
                asked = file.read()
        try:
            words, environment, folder, blocked = json.loads(asked)
        except ValueError:  # Ray has killed the process that asks; without this process no worker would start any more
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        if os.fork() == 0:
            listener.close()
            test_process.close()
            become(words, environment, folder, blocked, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def become(words: list[str], environment: dict[str, str], folder: str, blocked: list[int], streams: list[int]) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    ask(sys.argv[1:])
