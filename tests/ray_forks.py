"""Ray's workers as forks of one process, which has imported for all of them. No test by itself.

A worker imports for three seconds, and tests start hundreds of them. A node of Ray that starts in the block of
`RayForks.start_workers` runs this file to start a worker: it gives its words, environment and streams to the process
that forks, and ends. Commands that tests start as processes of their own have Ray's usual workers, unless a test sets
`forked_workers` (tests/launcher_forks.py). Ray does not end a fork that is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forks import Forking, Job, ask

if TYPE_CHECKING:
    from launcher_forks import Launchers

SOCKET = "RL_PLATFORM_TEST_RAY_FORKS"
# Packages that Ray's workers import. They take half of the time of `import ray`. Ray itself is not among them: it reads
# its settings from the environment when it is imported.
IMPORTED_BY_RAY = """
import sys
import cloudpickle, google.protobuf.internal.builder, jsonschema, msgpack, pdb, pydantic.v1, requests
import pyarrow, rl_platform.runtime.lifecycle, tracemalloc, wcwidth, xxhash
assert "ray" not in sys.modules
"""
WORKER = """
import runpy, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, {})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LANGUAGE, CONTEXT = "--language=", "--serialized-runtime-env-context="


class RayForks:
    """The process that forks, itself a fork of the process of `launchers`; leave the block and it is gone."""

    def __init__(self, launchers: Launchers) -> None:
        self._launchers = launchers

    def __enter__(self) -> RayForks:
        code = f"from forks import main; main(3, {IMPORTED_BY_RAY!r})"
        self._forking = Forking(lambda number: self._launchers.start(Path("/tmp"), code=code, descriptors={3: number}))
        self.path = self._forking.path
        return self

    def __exit__(self, *_: object) -> None:
        self._forking.close()

    def workers(self) -> set[Any]:
        """Returns the present workers, as processes of psutil."""
        import psutil  # here, as each worker runs this file first

        return set(psutil.Process(self._forking.process.pid).children(recursive=True))

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


def main(words: list[str]) -> None:
    """Asks for a fork that is the worker of these words. Ray starts it itself if it has an environment of its own."""
    context = next((word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)), "{}")
    if json.loads(context).get("env_vars") or f"{LANGUAGE}PYTHON" not in words:
        os.execv(sys.executable, [sys.executable, "-m", "ray._private.workers.setup_worker", *words])
    words = [word for word in words if not word.startswith((LANGUAGE, CONTEXT))]
    code = WORKER.format([*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))])
    job = Job(code=code, arguments=words, environment=dict(os.environ), folder=os.getcwd())
    ask(os.environ[SOCKET], job, {number: number for number in range(3)})


if __name__ == "__main__":
    main(sys.argv[1:])
