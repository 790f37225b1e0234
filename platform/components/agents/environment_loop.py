"""`rollout.agent.environment`: each response of the policy is a step, and the environment answers with text.

An environment that raises, hangs or dies costs its trajectory.
"""

from __future__ import annotations

from typing import Any

from rl_platform.components.agents.chat_session import ChatSession
from rl_platform.components.agents.text_environments import ENVIRONMENTS, environment_class
from rl_platform.components.agents.tool_loop import shortened
from rl_platform.components.agents.tool_processes import LETTERS_PER_TOKEN, Lease, ToolProcesses
from rl_platform.config.schema.rollout import Agent
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.tokenizer import Tokenizer


class EnvironmentLoop:
    """One rank's environments."""

    def __init__(self, options: Agent, tokenizer: Tokenizer) -> None:
        assert options.environment is not None
        self._options, self._own, self._tokenizer = options, options.environment, tokenizer
        self._processes = ToolProcesses(options.num_workers)

    def close(self) -> None:
        self._processes.close()

    async def run(self, session: ChatSession, question: dict[str, Any], place: int, seed: int) -> float:
        """Runs an episode to its end, its length or its last call. Returns the reward."""
        timeout_s, longest = self._own.timeout_s, self._own.max_result_tokens
        limit = {"longest": longest * LETTERS_PER_TOKEN}
        lease = Lease(self._processes, place)
        total = 0.0
        try:
            spec = {"type": self._own.type, "params": self._own.params}
            text = await lease.ask("reset", timeout_s, environment=spec, question=question, seed=seed, **limit)
            system = [each for each in question["messages"][:1] if each["role"] == "system"]
            messages = [*system, {"role": "user", "content": shortened(text, self._tokenizer, longest)}]
            for _ in range(self._options.max_calls):
                if (said := await session.say(messages)) is None:
                    break
                text, reward, done = await lease.ask("step", timeout_s, text=said[1], **limit)
                total += reward
                if done:
                    break
                messages += [said[0], {"role": "user", "content": shortened(text, self._tokenizer, longest)}]
            score = await lease.end()
        finally:
            lease.leave()
        return total if score is None else score


def check_environment(options: Agent) -> None:
    """Raises ConfigError if the environment cannot be imported, or a built-in one refuses its parameters."""
    spec = options.environment
    assert spec is not None
    found = environment_class(spec.type)
    if spec.type not in ENVIRONMENTS:
        return
    try:
        found(spec.params).reset({}, 0)
    except Exception as error:
        message = f"{spec.type} refuses them: {type(error).__name__}: {error}"
        raise ConfigError([Problem("rollout.agent.environment.params", message, value=str(spec.params))]) from error
