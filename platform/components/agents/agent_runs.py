"""`rollout.agent` on one rank: trajectories with several calls of the policy.

There are three callers: an agent of the user through an endpoint of the rollout, the loop with tools, and the loop with
a text environment. The latter may have tools too. Rows, limits, retries and failures are the same for all.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from rl_platform.components.agents.agent_function import JsonObject
from rl_platform.components.agents.agent_process import AgentFailed, AgentProcess
from rl_platform.components.agents.chat_endpoint import ChatEndpoint
from rl_platform.components.agents.chat_session import ChatSession, Refused
from rl_platform.components.agents.conversations import Deliver, Seed
from rl_platform.components.agents.environment_loop import EnvironmentLoop
from rl_platform.components.agents.generations import Generations
from rl_platform.components.agents.tool_formats import format_of
from rl_platform.components.agents.tool_loop import ToolLoop
from rl_platform.components.agents.verifiers_program import TYPE, program
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import RolloutEngine
from rl_platform.envs.reasoning.prompts import messages_of
from rl_platform.models.tokenizer import Tokenizer
from rl_platform.records import Conversation, Prompt, SamplingParams, Trajectory
from rl_platform.rng import derive_seed

NO_CALL = "the agent ended without a call of the endpoint"


class AgentRuns:
    """A trajectory without a reward (its agent raised, hung, died or made no call) is masked out, and the run
    continues."""

    def __init__(self, config: Config, engine: RolloutEngine, tokenizer: Tokenizer) -> None:
        assert config.rollout.agent is not None
        self.config, self.engine, self.tokenizer = config, engine, tokenizer
        self.options = config.rollout.agent
        self._endpoint: ChatEndpoint | None = None
        self._process: AgentProcess | None = None
        self._environment: EnvironmentLoop | None = None
        self._tools: ToolLoop | None = None
        self._format = format_of(tokenizer, self.options, config.data.use_chat_template)
        if (program := self._program()) is not None:
            self._endpoint = ChatEndpoint()
            self._process = AgentProcess(*program, self._endpoint.base_url)
        if self.options.tools:
            self._tools = ToolLoop(self.options, tokenizer, self._format)
        if self.options.environment is not None and self._process is None:
            self._environment = EnvironmentLoop(self.options, tokenizer, self._tools)

    def _program(self) -> tuple[str, str] | None:
        """Returns the program that calls the endpoint, and its argument; None if there is none."""
        if self.options.function is not None:
            return "agent_program", self.options.function
        if self.options.environment is not None and self.options.environment.type == TYPE:
            return program(self.options.environment.params)
        return None

    def close(self) -> None:
        """Ends the processes and the endpoint."""
        for each in (self._process, self._endpoint, self._environment, self._tools):
            if each is not None:
                each.close()

    def generate(
        self, wanted: Sequence[tuple[Prompt, int]], seed: Seed, sampling: SamplingParams, deliver: Deliver
    ) -> None:
        """Yields one trajectory for every prompt and sample number, in the order in which they end."""
        if not wanted:
            return
        longest = self.config.data.longest_sequence
        if self._tools is not None:
            self._tools.begin()
        at_once = min(self.options.max_running, len(wanted))
        lockstep = self.config.runner.deterministic
        generations = Generations(self.engine, sampling, longest, at_once, lockstep)

        async def trajectory(place: int) -> None:
            prompt, sample = wanted[place]
            for attempt in range(self.options.retries + 1):
                ended, detail = await self._run(place, prompt, sample, attempt, seed, generations)
                if ended is not None:
                    break
            deliver(ended or self._failed(prompt, sample, detail))

        try:
            generations.run(len(wanted), trajectory)
        finally:
            if self._process is not None:
                self._process.end_abandoned()

    def _named(self) -> str:
        if self.options.environment is not None:
            return f".environment {self.options.environment.type}"
        return f".function {self.options.function}" if self.options.function else ".tools"

    async def _run(
        self, place: int, prompt: Prompt, sample: int, attempt: int, seed: Seed, generations: Generations
    ) -> tuple[Trajectory | None, str]:
        """Returns the trajectory of one attempt, or None and why it failed."""
        session = ChatSession(
            place,
            generations,
            self.tokenizer,
            self.config.data,
            self.options.max_calls,
            lambda *call: seed(prompt, sample, *call),
            self.engine.version,
            self._format,
        )
        reward: float | None = None
        counts: dict[str, int] = {}
        try:
            async with asyncio.timeout(self.options.timeout_s):
                number = derive_seed(self.config.runner.seed, "environment", prompt.text, prompt.answer)
                if self._environment is not None:
                    reward, counts = await self._environment.run(session, self._question(prompt), place, number)
                elif self._tools is not None:
                    counts = await self._tools.run(session, self._question(prompt), place)
                else:
                    reward = await self._black_box(session, prompt, number)
        except TimeoutError:
            return None, f"not finished within {self.options.timeout_s:g} s (rollout.agent.timeout_s)"
        except Refused as refused:
            return None, str(refused)
        except AgentFailed as failed:
            if not session.overflowed or self._process is None:  # else it is cut at its length, as any response
                return None, str(failed)
        trajectory = session.trajectory(prompt, sample, attempt)
        if trajectory is None:
            return None, session.overflowed or NO_CALL
        assert trajectory.conversation is not None
        conversation = replace(trajectory.conversation, reward=reward, counts=tuple(counts.items()))
        return replace(trajectory, conversation=conversation), ""

    async def _black_box(self, session: ChatSession, prompt: Prompt, seed: int) -> float | None:
        assert self._process is not None
        assert self._endpoint is not None
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        key = secrets.token_urlsafe(24)
        with self._endpoint.serving(key, session):
            question = {**self._question(prompt), "messages": messages, "seed": seed}
            job: dict[str, object] = {"question": question, "key": key}
            reward = await asyncio.wrap_future(self._process.run(job))
        assert reward is None or isinstance(reward, float)
        return reward

    def _question(self, prompt: Prompt) -> JsonObject:
        messages = prompt.messages or messages_of(prompt.text, self.config.data)
        return {"text": prompt.text, "messages": messages, "answer": prompt.answer, "metadata": prompt.metadata}

    def _failed(self, prompt: Prompt, sample: int, detail: str) -> Trajectory:
        end = self.tokenizer.eos_token_ids[0]
        failed = Conversation(("",), (False,), 0, failed=True, retries=self.options.retries)
        response = Trajectory(prompt, sample, (end,), (0.0,), "stop", self.engine.version, conversation=failed)
        return replace(response, valid=False, outcome=f"rollout.agent{self._named()} failed", verdict=detail)
