"""`rollout.agent` on one rank: an agent of the user works on every question through an endpoint of the rollout."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from rl_platform.components.agents.agent_process import AgentFailed, AgentProcess
from rl_platform.components.agents.chat_endpoint import ChatEndpoint
from rl_platform.components.agents.chat_session import ChatSession, Limits
from rl_platform.components.agents.conversations import Deliver, Seed
from rl_platform.components.agents.generations import Generations
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import RolloutEngine
from rl_platform.errors import WorkerError
from rl_platform.models.tokenizer import Tokenizer
from rl_platform.records import Conversation, Prompt, SamplingParams, Trajectory

NO_CALL = "the agent ended without a call of the endpoint"


class AgentRuns:
    """A trajectory without a reward (its agent raised, hung, died or made no call) is masked out, and the run goes
    on."""

    def __init__(self, label: str, config: Config, engine: RolloutEngine, tokenizer: Tokenizer) -> None:
        assert config.rollout.agent is not None
        self.label, self.config, self.engine, self.tokenizer = label, config, engine, tokenizer
        self.options = config.rollout.agent
        self.endpoint = ChatEndpoint()
        self.process = AgentProcess(self.options.function, self.endpoint.base_url)

    def close(self) -> None:
        """Ends the agents and the endpoint."""
        self.process.close()
        self.endpoint.close()

    def generate(
        self, wanted: Sequence[tuple[Prompt, int]], seed: Seed, sampling: SamplingParams, deliver: Deliver
    ) -> None:
        """One trajectory for every prompt and sample number, in the order they are complete.

        Raises WorkerError if every agent failed.
        """
        if not wanted:
            return
        data, failures = self.config.data, list[str]()
        longest = data.max_prompt_length + data.max_response_length
        at_once = min(self.options.max_running, len(wanted))
        lockstep = self.config.runner.deterministic
        generations = Generations(self.engine, sampling, longest, at_once, lockstep)

        async def trajectory(place: int) -> None:
            prompt, sample = wanted[place]
            for attempt in range(self.options.retries + 1):
                ended, detail = await self._run(place, prompt, sample, attempt, seed, generations)
                if ended is not None:
                    break
            if ended is None:
                failures.append(detail)
            deliver(ended or self._failed(prompt, sample, self.options.retries))

        try:
            generations.run(len(wanted), trajectory)
        finally:
            self.process.end_abandoned()
        if len(failures) == len(wanted):
            raise WorkerError(
                f"{self.label}: rollout.agent.function {self.options.function} failed for all of {len(wanted)} "
                f"questions. The last one:\n{failures[-1]}"
            )

    async def _run(
        self, place: int, prompt: Prompt, sample: int, attempt: int, seed: Seed, generations: Generations
    ) -> tuple[Trajectory | None, str]:
        """The trajectory of one attempt, or None and why it failed."""
        data, longest = self.config.data, generations.sampling.max_new_tokens
        limits = Limits(
            data.max_prompt_length, data.max_response_length, longest, self.options.max_calls, data.use_chat_template
        )
        session = ChatSession(
            place,
            generations,
            self.tokenizer,
            limits,
            lambda *call: seed(prompt, sample, *call),
            self.engine.version,
        )
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        question = {"text": prompt.text, "messages": messages, "answer": prompt.answer, "metadata": prompt.metadata}
        key, reward = secrets.token_urlsafe(24), None
        with self.endpoint.serving(key, session):
            try:
                async with asyncio.timeout(self.options.timeout_s):
                    reward = await asyncio.wrap_future(self.process.run(question, key))
            except TimeoutError:
                return None, f"not finished within {self.options.timeout_s:g} s (rollout.agent.timeout_s)"
            except AgentFailed as failed:
                if not session.overflowed:  # else the trajectory is cut at its length, as any response
                    return None, str(failed)
        trajectory = session.trajectory(prompt, sample, attempt)
        if trajectory is None:
            return None, NO_CALL
        assert trajectory.conversation is not None
        return replace(trajectory, conversation=replace(trajectory.conversation, reward=reward)), ""

    def _failed(self, prompt: Prompt, sample: int, retries: int) -> Trajectory:
        end = self.tokenizer.eos_token_ids[0]
        conversation = Conversation(("",), (False,), 0, failed=True, retries=retries)
        return Trajectory(
            prompt, sample, (end,), (0.0,), "stop", self.engine.version, valid=False, conversation=conversation
        )
