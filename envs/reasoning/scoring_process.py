"""One scoring process as the pool sees it: its socket, the responses it was given, how long it has been at one.

When to start, kill or replace it is decided in `scoring.py`; what it does is in `scoring_worker.py`.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from rl_platform.envs.reasoning.score import LONGEST_MESSAGE, Score
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec
from rl_platform.runtime.child import Child, Death

LARGEST_CHUNK = 16
QUICK_S = 0.005
SEND_LIMIT_S = 10.0  # for a process that is idle and yet does not read
READ_AT_ONCE = 2**18  # bytes
_WORKER = "from rl_platform.envs.reasoning.scoring_worker import main; main()"


@dataclass
class Job:
    """A response to score and who waits for its score."""

    item: ScoreItem
    future: Future[Score]
    failures: int = 0  # processes that ended, or sent something else than a score, while they scored it


class ScoringProcess:
    """One scoring process and the responses it was given, the first of which it works on."""

    def __init__(self, spec: VerifierSpec) -> None:
        self.child = Child(_WORKER, Death.THREAD)  # a verifier that hangs may hold the interpreter lock
        self.connection = self.child.socket
        self.connection.settimeout(SEND_LIMIT_S)
        self._received = b""
        self.ready = False
        self.jobs: deque[Job] = deque()
        self.chunk_size = 1
        self._since = time.monotonic()
        with suppress(OSError):  # a process that is dead already is noticed when its socket is read
            self._send(spec)

    @property
    def idle(self) -> bool:
        return self.ready and not self.jobs

    @property
    def waiting_s(self) -> float:
        """Seconds on the response in work, or since the process was started; 0 when idle."""
        return 0.0 if self.idle else time.monotonic() - self._since

    def start(self, jobs: list[Job]) -> bool:
        """False if the process is dead."""
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
        """The lines that are complete. Raises EOFError or OSError if the process ended, ValueError for an endless line.

        It never waits for the rest of a line: a process that withholds it must not hold up the others.
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

    def now_working(self) -> None:
        """One response is done. Quick ones make the next chunk larger, slow ones smaller."""
        now = time.monotonic()
        quick = now - self._since < QUICK_S
        self.chunk_size = min(2 * self.chunk_size, LARGEST_CHUNK) if quick else max(self.chunk_size // 2, 1)
        self._since = now

    def kill(self) -> None:
        """Kills it and what it started, and closes the socket. Again does nothing."""
        self.child.kill()
