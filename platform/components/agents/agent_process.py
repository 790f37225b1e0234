"""The process in which a user's agent runs, away from the engine. It is started again after it died."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from contextlib import suppress

from rl_platform.runtime.child import Child, Death

_PROGRAM = "from rl_platform.components.agents.agent_program import main; main()"


class AgentFailed(Exception):
    """An agent raised, or its process ended. The text is its traceback or the cause."""


class AgentProcess:
    """function: `rollout.agent.function`. base_url: of the endpoint."""

    def __init__(self, function: str, base_url: str) -> None:
        self._arguments = function, base_url
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._runs: dict[int, Future[float | None]] = {}
        self._count = 0

    def run(self, question: dict[str, object], key: str) -> Future[float | None]:
        """Starts the agent on a question. The future has its reward, or raises AgentFailed."""
        with self._lock:
            if self._child is None:
                self._child = Child(_PROGRAM, Death.GUARD, self._arguments)
                threading.Thread(target=self._read, args=(self._child,), daemon=True).start()
            self._count += 1
            self._runs[self._count] = future = Future[float | None]()
            job = {"id": self._count, "question": question, "key": key}
            with suppress(OSError):  # `_read` reports that the process is dead
                self._child.socket.sendall(json.dumps(job, default=str).encode() + b"\n")
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
        child.kill()
        for future in runs.values():
            if not future.done():
                future.set_exception(AgentFailed(f"the process of the agents ended: {why}"))

    def _end(self, message: dict[str, object]) -> None:
        with self._lock:
            future = self._runs.pop(int(str(message["id"])), None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if "error" in message:
            future.set_exception(AgentFailed(str(message["error"])))
        else:
            reward = message["reward"]
            future.set_result(None if reward is None else float(str(reward)))
