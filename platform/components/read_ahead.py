"""How many responses a reward rank may hold that are not scored yet."""

from __future__ import annotations

import threading
import time
from collections import deque

AHEAD_S = 0.1
MOST = 64  # responses that are read at once


class ReadAhead:
    """Lets a rank read twice as many responses as it scores at once, and as many more as it finished in `AHEAD_S`.

    All ranks read from one stream. If scoring is slow, a rank without this limit would read responses that others could
    score meanwhile; if it is fast, a rank must read many at once, because each read is a message. Thread-safe.
    """

    def __init__(self, at_once: int) -> None:
        self._changed = threading.Condition()
        self._least, self._unfinished, self._closed = 2 * at_once, 0, False
        self._finished: deque[float] = deque()  # times of the last AHEAD_S

    def room(self) -> int:
        """Waits until responses may be read; returns how many, 0 once closed."""
        with self._changed:
            while not self._closed:
                begin = time.monotonic() - AHEAD_S
                while self._finished and self._finished[0] < begin:
                    self._finished.popleft()
                if (room := self._least + len(self._finished) - self._unfinished) > 0:
                    return min(room, MOST)
                self._changed.wait()
            return 0

    def read(self, count: int) -> None:
        """Counts responses that were read."""
        with self._changed:
            self._unfinished += count

    def finished(self) -> None:
        """Counts a response that was scored and written."""
        with self._changed:
            self._unfinished -= 1
            self._finished.append(time.monotonic())
            self._changed.notify()

    def close(self) -> None:
        """Ends waits, as nothing is written any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
