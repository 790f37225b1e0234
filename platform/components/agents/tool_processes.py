"""The processes of a rank in which tools and text environments run (`tool_program.py`)."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any

from rl_platform.components.agents.agent_process import AgentFailed, AgentProcess

START_S = 60.0  # for a process to start, and for a trajectory's tools to be set up
END_S = 5.0
LETTERS_PER_TOKEN = 32  # a longer text is cut before it is sent


class ToolProcesses:
    """`count` processes. If a call hangs, its process gets no new trajectory, and it ends with its last one."""

    def __init__(self, count: int) -> None:
        self._current = [AgentProcess("tool_program") for _ in range(count)]
        self._users: Counter[AgentProcess] = Counter()

    def take(self, place: int) -> AgentProcess:
        """Returns the process of the trajectory `place`."""
        process = self._current[place % len(self._current)]
        self._users[process] += 1
        return process

    def release(self, process: AgentProcess, hung: bool) -> None:
        if hung and process in self._current:
            self._current[self._current.index(process)] = AgentProcess("tool_program")
        self._users[process] -= 1
        if not self._users[process]:
            del self._users[process]
            if process not in self._current:
                process.close()

    def close(self) -> None:
        for process in {*self._current, *self._users}:
            process.close()


class Lease:
    """The tools or the environment of the trajectory `place`. setup: of the tools, or the environment's type; a new
    process repeats it."""

    def __init__(self, processes: ToolProcesses, place: int, **setup: object) -> None:
        self._processes, self._place, self._setup = processes, place, setup
        self._key = secrets.token_hex(8)
        self._process = processes.take(place)
        self._deaths = -1  # of the process when the trajectory was set up in it

    async def set_up(self) -> None:
        """Sets the trajectory's tools up in its process, unless they are. Raises AgentFailed."""
        if self._deaths == self._process.deaths:
            return
        try:
            await self._within(START_S, do="start", **self._setup)
        except TimeoutError as error:
            raise AgentFailed(f"not set up within {START_S:g} s") from error
        self._deaths = self._process.deaths

    async def ask(self, do: str, timeout_s: float, **job: object) -> Any:
        """Returns the result of a job of `tool_program.py`. Raises AgentFailed, and TimeoutError if it takes too
        long."""
        await self.set_up()
        return await self._within(timeout_s, do=do, **job)

    async def _within(self, seconds: float, **job: object) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._process.run({"key": self._key, **job}))
        except (TimeoutError, asyncio.CancelledError):  # the trajectory's instances may be in any state
            self._processes.release(self._process, hung=True)
            self._process, self._deaths = self._processes.take(self._place), -1
            raise

    async def end(self) -> float | None:
        """Closes the trajectory's instances. Returns the score of an environment that has one."""
        score: float | None = await self.ask("end", END_S)
        self._deaths = -1
        return score

    def leave(self) -> None:
        """Gives the process back. The instances of a trajectory that has failed are closed without a wait."""
        if self._deaths == self._process.deaths:
            self._process.run({"key": self._key, "do": "end"})
        self._processes.release(self._process, hung=False)


def error_line(error: AgentFailed) -> str:
    """Returns the last line of a traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1][:500] if lines else "it failed"
