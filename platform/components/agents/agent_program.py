"""The program of an agent process, which `agent_process.py` starts: runs a user's agent function for many questions.

It reads lines of JSON, {"id", "question", "key"}, and writes one line for each: {"id", "result"} or {"id", "error"}.
Coroutine functions share one event loop; other functions run in a thread each.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable

from rl_platform.components.agents.agent_function import AGENT, AgentFunction, JsonObject
from rl_platform.envs.reasoning.score import checked_reward
from rl_platform.standard_streams import never_fail

_LONGEST_ERROR = 4_000  # characters


def main() -> None:
    """Runs the process. Its arguments are the socket's descriptor, the function's name and the endpoint's URL."""
    never_fail()
    serve_agent(AGENT.load(sys.argv[2]), sys.argv[3])


def serve_agent(function: AgentFunction, base_url: str) -> None:
    """Runs an agent for each job that arrives, until the socket is closed."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(job: JsonObject) -> float | None:
        reward: object = function(job["question"], base_url, job["key"])
        if inspect.isawaitable(reward):
            reward = asyncio.run_coroutine_threadsafe(_awaited(reward), loop).result()
        return None if reward is None else checked_reward(reward)

    serve(run)


def serve(run: Callable[[JsonObject], object]) -> None:
    """Runs each job that arrives in a thread of its own, until the socket is closed."""
    connection, writing = socket.socket(fileno=int(sys.argv[1])), threading.Lock()

    def answer(job: JsonObject) -> None:
        try:
            line = json.dumps({"id": job["id"], "result": run(job)})
        except BaseException:
            line = json.dumps({"id": job["id"], "error": traceback.format_exc()[-_LONGEST_ERROR:]})
        with writing:
            connection.sendall(line.encode() + b"\n")

    for line in connection.makefile("rb"):
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()


async def _awaited(reward: Awaitable[object]) -> object:
    return await reward
