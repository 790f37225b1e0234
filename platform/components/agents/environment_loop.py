"""`rollout.agent.environment`: each response of the policy is a step, and the environment answers with text.

With `rollout.agent.tools`, responses with calls are no steps: the policy reads the results and continues. An
environment that raises, hangs or dies costs its trajectory.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.components.agents.agent_process import AgentFailed
from rl_platform.components.agents.chat_session import ChatSession
from rl_platform.components.agents.text_environments import ENVIRONMENTS, OPENENV, environment_class
from rl_platform.components.agents.tool_loop import ToolLoop, shortened
from rl_platform.components.agents.tool_processes import END_S, LETTERS_PER_TOKEN, Lease, ToolProcesses
from rl_platform.components.agents.verifiers_program import TYPE, check_verifiers
from rl_platform.config.schema.rollout import Agent
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.tokenizer import Tokenizer


class EnvironmentLoop:
    """One rank's environments. tools: that the policy may call between two steps."""

    def __init__(self, options: Agent, tokenizer: Tokenizer, tools: ToolLoop | None) -> None:
        assert options.environment is not None
        self._options, self._own, self._tokenizer, self._tools = options, options.environment, tokenizer, tools
        self._processes = ToolProcesses(options.num_workers)

    def close(self) -> None:
        self._processes.close()

    async def run(
        self, session: ChatSession, question: JsonObject, place: int, seed: int
    ) -> tuple[float, dict[str, int]]:
        """Runs an episode to its end, its length or its last call. Returns the reward, and counts of each tool."""
        tools, lease = self._tools, Lease(self._processes, place, environment=self._own.type)
        called = None if tools is None else tools.lease(place, question)
        counts: Counter[str] = Counter() if tools is None else tools.counts()
        try:
            if called is not None:
                await called.set_up()
            reward = await self._episode(session, question, seed, lease, called, counts)
            if called is not None:
                with suppress(TimeoutError, AgentFailed):
                    await called.end()
            return reward, dict(counts)
        finally:
            for each in (lease, called):
                if each is not None:
                    each.leave()

    async def _episode(
        self,
        session: ChatSession,
        question: JsonObject,
        seed: int,
        lease: Lease,
        called: Lease | None,
        counts: Counter[str],
    ) -> float:
        longest = self._own.max_result_tokens
        limit = {"longest": longest * LETTERS_PER_TOKEN}
        spec = {"type": self._own.type, "params": self._own.params}
        text = await self._ask(lease, "reset", environment=spec, question=question, seed=seed, **limit)
        system = [each for each in question["messages"][:1] if each["role"] == "system"]
        messages = [*system, {"role": "user", "content": shortened(text, self._tokenizer, longest)}]
        messages, schemas = (messages, None) if self._tools is None else self._tools.described(messages)
        total = 0.0
        for _ in range(self._options.max_calls):
            if (said := await session.say(messages, schemas)) is None:
                break
            if self._tools and called and (results := await self._tools.results(said, called, counts)):
                messages += [said[0], *results]
                continue
            text, reward, done = await self._ask(lease, "step", text=said[1], **limit)
            total += reward
            if done:
                break
            messages += [said[0], {"role": "user", "content": shortened(text, self._tokenizer, longest)}]
        try:
            score = await lease.end()
        except TimeoutError as error:
            raise AgentFailed(f"score() and close() took more than {END_S:g} s") from error
        return total if score is None else score

    async def _ask(self, lease: Lease, do: str, **job: object) -> Any:
        """Returns the result of a method of the environment. Raises AgentFailed, also if it takes too long."""
        try:
            return await lease.ask(do, self._own.timeout_s, **job)
        except TimeoutError as error:  # that of the whole trajectory arrives as CancelledError
            key = "rollout.agent.environment.timeout_s"
            raise AgentFailed(f"{do}() took more than {self._own.timeout_s:g} s ({key})") from error


def check_environment(options: Agent) -> None:
    """Raises ConfigError if the environment cannot be imported, or a built-in one refuses its parameters."""
    spec = options.environment
    assert spec is not None
    if spec.type == TYPE:
        check_verifiers(spec.params)
        return
    environment_type = environment_class(spec.type)
    if spec.type not in (*ENVIRONMENTS, OPENENV):
        return
    try:
        environment = environment_type(spec.params)
        environment.reset({}, 0)
        if callable(close := getattr(environment, "close", None)):
            close()
    except Exception as error:
        message = f"{spec.type} refuses them: {type(error).__name__}: {error}"
        raise ConfigError([Problem("rollout.agent.environment.params", message, value=str(spec.params))]) from error
