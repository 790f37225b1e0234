"""Code of the user behind `rollout.multi_turn` and `rollout.agent`: an agent, tools, a text environment. See
docs/agents.md."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar, Protocol

from rl_platform.user_code import Extension

JsonObject = dict[str, Any]  # a message, a schema, arguments of a call or parameters


class Tool(Protocol):
    """A tool that answers the policy's turns."""

    def __call__(self, conversation: list[str], metadata: dict[str, object], /) -> str | None:
        """Returns the observation after the last turn, or None if there is none: the response is then complete.

        conversation: the question, then alternating turns of the policy and observations, up to the turn to answer. It
        is whole, so a tool can rebuild the state of an environment. metadata: of the question.
        """


class AgentFunction(Protocol):
    """An agent: it works on one question through an OpenAI-compatible endpoint."""

    def __call__(self, question: dict[str, object], base_url: str, api_key: str, /) -> float | Awaitable[object] | None:
        """Returns the reward of what it did, or None if the reward component scores it. May be a coroutine function.

        question: `text`, `messages`, `answer`, `metadata` and `seed`, equal for all its samples. base_url, api_key: of
        the endpoint, for this call only.
        """


class AgentTool(Protocol):
    """A tool that the policy calls. Each trajectory has an instance of its own; a method `close()` is called at its
    end, if the class has one.

    schema: `name`, `description` and `parameters`, a JSON schema of an object.
    """

    schema: ClassVar[JsonObject]

    def __init__(self, question: JsonObject, params: JsonObject, /) -> None:
        """question: as of an agent. params: of the config."""

    def call(self, arguments: JsonObject, /) -> str:
        """Returns the result that the policy reads. The arguments fit the schema. If it raises, the policy reads the
        last line of the traceback."""


class TextEnvironment(Protocol):
    """A game or task that answers each response of the policy. Each trajectory has an instance of its own.

    A method `score()`, if the class has one, returns the reward of the trajectory; else it is the sum of the rewards. A
    method `close()` is called at the end, if the class has one.
    """

    def __init__(self, params: JsonObject, /) -> None:
        """params: of the config."""

    def reset(self, question: JsonObject, seed: int, /) -> str:
        """Returns the first text that the policy reads. seed: the same for all samples of the question."""

    def step(self, text: str, /) -> tuple[str, float, bool]:
        """Returns the answer to a response of the policy, its reward, and whether the episode has ended."""


TOOL = Extension("tool", "rollout.multi_turn.tool", Tool, "function(conversation, metadata) -> str or None")
AGENT = Extension(
    "agent",
    "rollout.agent.function",
    AgentFunction,
    "function(question, base_url, api_key) -> reward or None",
    awaits=True,
)
AGENT_TOOL = Extension(
    "tool by JSON schema",
    "rollout.agent.tools",
    AgentTool,
    "class with schema, __init__(question, params), call(arguments) -> str",
)
TEXT_ENVIRONMENT = Extension(
    "text environment",
    "rollout.agent.environment",
    TextEnvironment,
    "class with __init__(params), reset(question, seed) -> str, step(text) -> (str, reward, done)",
)
