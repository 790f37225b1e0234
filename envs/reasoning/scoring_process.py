"""The pool's handle of one scoring process: its socket, its responses, and the time spent on the current response.

Not covered: when a process is started, killed or replaced (`scoring.py`), and its program (`scoring_worker.py`).
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

import psutil

from rl_platform.envs.reasoning.score import LONGEST_MESSAGE, Score
from rl_platform.envs.reasoning.verifiers import VerifierSpec
from rl_platform.runtime.child import Child, Death

LARGEST_CHUNK = 16
QUICK_S = 0.005
SEND_LIMIT_S = 10.0  # of an idle process that does not read
READ_AT_ONCE = 2**18  # bytes
_WORKER = "from rl_platform.envs.reasoning.scoring_worker import main; main()"


Item = TypeVar("Item", contravariant=True)


class ScoringSpec(Protocol[Item]):
    """A verifier or a tool that a scoring process loads. The score of a tool is its answer. A spec can be pickled."""

    @property
    def key(self) -> str:
        """The config key that `type` is the value of."""

    @property
    def type(self) -> str: ...

    def load(self) -> Callable[[Item], object]:
        """Returns the function of an item. Raises ConfigError if there is none."""


@dataclass
class Job:
    """A response to score, and the future of its score."""

    item: Any
    future: Future[Score]
    failures: int = 0  # processes that ended or sent an invalid line while they scored it


class ScoringProcess:
    """One scoring process and its responses in `jobs`; it scores the first of them."""

    def __init__(self, spec: ScoringSpec[Any]) -> None:
        self.child = Child(_WORKER, Death.THREAD)  # a verifier that hangs may hold the interpreter lock
        self._makes_copies = isinstance(spec, VerifierSpec) and spec.built_in
        self.connection = self.child.socket
        self.connection.settimeout(SEND_LIMIT_S)
        self._received = b""
        self.ready = False
        self.jobs: deque[Job] = deque()
        self.chunk_size = 1
        self._since = time.monotonic()
        with suppress(OSError):  # reading the socket reports that the process is dead
            self._send(spec)

    @property
    def idle(self) -> bool:
        return self.ready and not self.jobs

    @property
    def waiting_s(self) -> float:
        """Seconds since the current response was begun, or since the process was started; 0 when idle."""
        return 0.0 if self.idle else time.monotonic() - self._since

    def start(self, jobs: list[Job]) -> bool:
        """Sends responses to the process. Returns False if the process is dead."""
        self.jobs.extend(jobs)
        self._since = time.monotonic()
        try:
            self._send([job.item for job in jobs])
        except OSError:
            return False
        return True

    @property
    def has_written(self) -> bool:
        """Whether `read` returns at once."""
        return bool(wait([self.connection], 0.0))

    def read(self) -> list[bytes]:
        """Returns the complete lines. Raises EOFError or OSError if the process ended, ValueError for a line too long.

        It does not wait for the rest of a line, because a process that withholds it must not delay the others.
        """
        arrived = self.connection.recv(READ_AT_ONCE)
        if not arrived:
            raise EOFError
        *lines, self._received = (self._received + arrived).split(b"\n")
        if len(self._received) > LONGEST_MESSAGE:
            raise ValueError(f"a line of more than {LONGEST_MESSAGE} bytes")
        return lines

    def _send(self, message: object) -> None:
        self.connection.sendall(pickle.dumps(message))

    def next_response(self) -> None:
        """Updates the chunk size after a score: a quick response doubles it, a slow one halves it."""
        now = time.monotonic()
        quick = now - self._since < QUICK_S
        self.chunk_size = min(2 * self.chunk_size, LARGEST_CHUNK) if quick else max(self.chunk_size // 2, 1)
        self._since = now

    def kill(self) -> None:
        """Kills the process and what it started, and closes the socket. May be called twice."""
        descendants: list[psutil.Process] = []
        if self._makes_copies and not self.child.ended:
            with suppress(psutil.NoSuchProcess):
                descendants = psutil.Process(self.child.pid).children(recursive=True)
        self.child.kill()
        for process in descendants:  # a copy may have left the session
            with suppress(psutil.NoSuchProcess):
                process.kill()
