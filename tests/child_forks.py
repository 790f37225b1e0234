"""Child processes of the platform as forks of processes that have imported for them. No test by itself.

In the block of `forked_children`, `rl_platform.runtime.child.Child` starts `python -c CODE` as a fork of a process with
the same interpreter and the same environment variables, which has imported what the child needs. Such a process starts
at the first child and ends with the block. Children of other processes, as those of Ray, start as usual.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from forks import PATH, Fork, Forking, Job

# Variables in which a child may differ from the process that forks. A run in this process sets the last ones.
OTHERS = ("PYTHONPATH", "PYTEST_CURRENT_TEST", "PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RL_PLATFORM_ACCELERATE")


class Children:
    """Starts children as forks of processes, one for each interpreter and environment."""

    def __init__(self, programs: str, preload: str, others: Sequence[str], popen: Any) -> None:
        self._programs, self._preload, self._usual, self._lock = programs, preload, popen, threading.Lock()
        self._others = {*OTHERS, *others}
        self._forking: dict[str, Forking] = {}

    def popen(self, command: Sequence[str], **options: Any) -> Any:
        """Starts a child with the options that `Child` gives."""
        python, option, code, *arguments = command
        if self._programs not in code:
            return self._usual(command, **options)
        assert option == "-c"
        assert options.pop("start_new_session")
        return self._fork(python, code, arguments, **options)

    def _fork(
        self,
        python: str,
        code: str,
        arguments: list[str],
        env: dict[str, str],
        stdin: int,
        stdout: Any,
        stderr: Any,
        pass_fds: Sequence[int],
    ) -> Fork:
        theirs, kept = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        output = {number: number if file is None else file.fileno() for number, file in ((1, stdout), (2, stderr))}
        descriptors = {0: theirs, **output, **{number: number for number in pass_fds}}
        job = Job(code=code, arguments=["-c", *arguments], environment=env, folder=os.getcwd())
        try:
            pipe = None if kept is None else os.fdopen(kept, "wb", 0)
            with self._lock:
                forking = self._process(python, env)
            return Fork(forking.path, job, descriptors, pipe)
        finally:
            os.close(theirs)

    def _process(self, python: str, env: dict[str, str]) -> Forking:
        key = json.dumps([python, sorted(item for item in env.items() if item[0] not in self._others)])

        def start(descriptor: int) -> subprocess.Popen[bytes]:
            command = [python, "-W", "ignore", PATH, str(descriptor), self._preload]
            none = subprocess.DEVNULL
            return subprocess.Popen(command, env=env, stdin=none, pass_fds=[descriptor], start_new_session=True)

        if key not in self._forking:
            self._forking[key] = Forking(start)
        return self._forking[key]

    def close(self) -> None:
        for forking in self._forking.values():
            forking.close()


@contextmanager
def forked_children(programs: str, preload: str, others: Sequence[str] = ()) -> Iterator[None]:
    """programs: a part of the code of the children that are forks. preload: code with the imports that they need.

    others: further variables in which a child may differ from the process that forks. No import may read them.
    """
    import rl_platform.runtime.child as patched

    children = Children(programs, preload, others, patched.subprocess.Popen)
    options = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patched, "subprocess", SimpleNamespace(Popen=children.popen, **options))
            yield
    finally:
        children.close()
