"""The process in which code of the user runs, away from the engine: agents, tools or text environments.

It is started again after it died.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress

from rl_platform.runtime.child import Child, Death

_PROGRAM = "from rl_platform.components.agents.{0} import main; main()"
_SEND_LIMIT_S = 5


class AgentFailed(Exception):
    """Code of the user raised, or its process ended. The text is its traceback or the cause."""


class AgentProcess:
    """program: the module of this folder that runs in the process. arguments: of its command line."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._program, self._arguments = _PROGRAM.format(program), arguments
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._runs: dict[int, Future[object]] = {}
        self._count = 0
        self.deaths = 0

    def run(self, job: dict[str, object]) -> Future[object]:
        """Starts a job. The future has its result, a value of JSON, or raises AgentFailed."""
        with self._lock:
            if self._child is None:
                self._child = Child(self._program, Death.GUARD, self._arguments)
                limit = struct.pack("ll", _SEND_LIMIT_S, 0)  # of a process that reads no more
                self._child.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                threading.Thread(target=self._read, args=(self._child,), daemon=True).start()
            self._count += 1
            self._runs[self._count] = future = Future[object]()
            try:
                self._child.socket.sendall(json.dumps(job | {"id": self._count}, default=str).encode() + b"\n")
            except OSError:  # `_read` reports that the process is dead
                self._child.kill()
        return future

    def end_abandoned(self) -> None:
        """Kills the process if an agent still runs in it. The trajectory of this agent has ended by its timeout."""
        with self._lock:
            abandoned = bool(self._runs)
        if abandoned:
            self.close()

    def close(self) -> None:
        with self._lock:
            child, self._child, self._runs = self._child, None, {}
        if child is not None:
            child.kill()

    def _read(self, child: Child) -> None:
        with suppress(OSError, ValueError), child.socket.makefile("rb") as lines:
            for line in lines:
                self._end(json.loads(line))
        why = child.exit_reason()
        with self._lock:
            if self._child is not child:  # closed, or another one runs
                return
            runs, self._runs, self._child = self._runs, {}, None
            self.deaths += 1
        child.kill()
        for future in runs.values():
            if not future.done():
                future.set_exception(AgentFailed(f"its process ended: {why}"))

    def _end(self, message: dict[str, object]) -> None:
        with self._lock:
            future = self._runs.pop(int(str(message["id"])), None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if "error" in message:
            future.set_exception(AgentFailed(str(message["error"])))
        else:
            future.set_result(message["result"])
