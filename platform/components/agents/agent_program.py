"""The program of an agent process, which `agent_process.py` starts: runs a user's agent function for many questions.

It reads lines of JSON, {"id", "question", "key"}, and writes one line for each: {"id", "reward"} or {"id", "error"}.
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
from typing import Any

from rl_platform.envs.reasoning.agent_function import AGENT
from rl_platform.envs.reasoning.score import checked_reward
from rl_platform.standard_streams import never_fail


def main() -> None:
    """Entry point: the arguments are the socket's descriptor, the function's name and the endpoint's URL."""
    never_fail()
    connection, name, base_url = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3]
    function = AGENT.load(name)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    writing = threading.Lock()

    def write(message: dict[str, object]) -> None:
        with writing:
            connection.sendall(json.dumps(message).encode() + b"\n")

    def run(job: dict[str, Any]) -> None:
        try:
            reward = function(job["question"], base_url, job["key"])
            if inspect.isawaitable(reward):
                reward = asyncio.run_coroutine_threadsafe(_awaited(reward), loop).result()
            write({"id": job["id"], "reward": None if reward is None else checked_reward(reward)})
        except BaseException:
            write({"id": job["id"], "error": traceback.format_exc()})

    for line in connection.makefile("rb"):
        threading.Thread(target=run, args=(json.loads(line),), daemon=True).start()


async def _awaited(reward: Any) -> Any:
    return await reward
