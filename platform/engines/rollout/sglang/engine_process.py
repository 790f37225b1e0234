"""An engine in a process of its own: calls go out, items and an answer come back, and its end is noticed.

The process may kill its own parent when it crashes (SGLang's does), use up memory or hang without harm to this process.
Not covered: what the calls do, see `program`.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_platform.errors import Deadline, WorkerDied, WorkerError
from rl_platform.runtime.child import Child, Death

ITEM, ANSWER, FAILED, DIED = "item", "answer", "failed", "died"  # kinds of what comes back for a call
LOG_LINES = 30  # of the end of the log, shown when the engine does not start


class EngineCall:
    """One call and what comes back for it."""

    def __init__(self, number: int, operation: str) -> None:
        self.number, self.operation = number, operation
        self.arrived: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def items(self, timeout: float | None = None) -> Iterator[Any]:
        """What arrives before the answer. Raises WorkerError if the engine refuses, WorkerDied if it dies, Deadline if
        nothing comes within `timeout` seconds."""
        while True:
            try:
                kind, value = self.arrived.get(timeout=timeout)
            except queue.Empty:
                raise Deadline(f"the engine did not answer to {self.operation} within {timeout:g} s") from None
            if kind == ITEM:
                yield value
            elif kind == ANSWER:
                self.value = value
                return
            else:
                raise WorkerDied(value) if kind == DIED else WorkerError(f"{self.operation}: {value}")

    def wait(self, timeout: float | None = None) -> Any:
        """The answer."""
        for _ in self.items(timeout):
            pass
        return self.value


class EngineProcess:
    """Starts `program`, sends it `setup` and then calls. Processes that it starts end with it.

    `environment` is added to that of this process. Output goes to `log`.
    """

    def __init__(self, program: str, setup: object, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_begins = output.tell()
            self.child = Child(program, Death.GUARD, environment=environment, output=output)
        self._connection = self.child.connection()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, EngineCall] = {}
        self._dead = False
        self._reader = threading.Thread(target=self._read, name="engine", daemon=True)
        self.started = self._register("start")
        with suppress(OSError):  # dead already: the reader reports it
            self._connection.send(setup)
        self._reader.start()

    def call(self, operation: str, *arguments: object) -> EngineCall:
        """Starts a call; returns at once."""
        call = self._register(operation)
        with self._lock, suppress(OSError):
            self._connection.send((call.number, operation, arguments))
        return call

    def kill(self) -> None:
        """Ends it and what it started. Again is fine."""
        self.child.kill()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join()

    def end_of_log(self, lines: int = LOG_LINES) -> str:
        """The last lines that this process wrote."""
        text = self.log.read_bytes()[self._log_begins :] if self.log.exists() else b""
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])

    def _register(self, operation: str) -> EngineCall:
        with self._lock:
            call = EngineCall(next(self._numbers), operation)
            if self._dead:
                call.arrived.put((DIED, self._obituary()))
            else:
                self._calls[call.number] = call
        return call

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, kind, value = self._connection.recv()
                call = self._calls.get(number) if kind == ITEM else self._calls.pop(number)
                if call is not None:
                    call.arrived.put((kind, value))
        self.child.kill()  # half an engine is of no use
        with self._lock:
            self._dead = True
            self._connection.close()
            left, self._calls = self._calls, {}
        for call in left.values():
            call.arrived.put((DIED, self._obituary()))

    def _obituary(self) -> str:
        return f"the engine's process died; its log is {self.log}"
