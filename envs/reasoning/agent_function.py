"""The function of a user's agent, `rollout.agent.function`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from rl_platform.user_code import Extension


class AgentFunction(Protocol):
    """An agent: it works on one question through an OpenAI-compatible endpoint, see docs/agents.md."""

    def __call__(self, question: dict[str, object], base_url: str, api_key: str, /) -> float | Awaitable[object] | None:
        """Returns the reward of what it did, or None if the reward component scores it. May be a coroutine function.

        question: `text`, `messages`, `answer` and `metadata`. base_url, api_key: of the endpoint, for this call only.
        """


AGENT = Extension(
    "agent", "rollout.agent.function", AgentFunction, "function(question, base_url, api_key) -> reward or None"
)
