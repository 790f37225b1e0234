"""Responses of several turns: a tool or an environment answers a turn of the policy, and the policy continues.

Each conversation takes its next turn as soon as its tool has answered, whatever the others do. The engine gets all
earlier tokens unchanged; sampled text is never encoded again. The answers of the tool are part of the response, but not
sampled: `Trajectory.conversation` marks their tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rl_platform.components.agents.generations import Generations, Sampled
from rl_platform.components.agents.turn_tool import ToolCall, ToolSpec
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import Completion, RolloutEngine
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.models.tokenizer import Tokenizer
from rl_platform.records import Conversation, Prompt, SamplingParams, Trajectory

Seed = Callable[..., int]  # of a prompt, a sample, and the turn or the agent's call of a draw
Deliver = Callable[[Trajectory], None]


@dataclass
class _Open:
    """A conversation that is not complete."""

    prompt: Prompt
    sample: int
    texts: list[str]  # for the tool: the question, then turns and observations
    turns: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    observations: int = 0
    finish_reason: str = ""
    version: int = -1


class Conversations:
    """`rollout.multi_turn` on one rank. If a tool raises, hangs or dies, its response has no reward and the run
    continues."""

    def __init__(self, config: Config, engine: RolloutEngine, tokenizer: Tokenizer) -> None:
        assert config.rollout.multi_turn is not None
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.options = config.rollout.multi_turn
        self.longest = config.data.max_response_length
        self.chat = config.data.use_chat_template
        spec = ToolSpec(self.options.tool)
        self.pool = ScoringPool(spec, num_workers=self.options.num_workers, timeout_s=self.options.timeout_s)

    def close(self) -> None:
        """Ends the processes in which the tool runs."""
        self.pool.close()

    def generate(
        self, wanted: Sequence[tuple[Prompt, int]], seed: Seed, sampling: SamplingParams, deliver: Deliver
    ) -> None:
        """Yields one trajectory for every prompt and sample number, in the order in which they end.

        `sampling.max_new_tokens` bounds a turn, data.max_response_length the whole response.
        """
        if not wanted:
            return
        longest = self.config.data.max_prompt_length + self.longest
        lockstep = self.config.runner.deterministic
        generations = Generations(self.engine, sampling, longest, len(wanted), lockstep)

        async def trajectory(place: int) -> None:
            prompt, sample = wanted[place]
            conversation = _Open(prompt, sample, [prompt.text])
            detail = ""
            for turn in range(self.options.max_turns):
                room = min(self.longest - len(conversation.token_ids), sampling.max_new_tokens)
                context = prompt.token_ids + tuple(conversation.token_ids)
                [completion] = await generations.sample(place, [Sampled(context, seed(prompt, sample, turn), room)])
                self._add_turn(conversation, completion)
                cut = len(conversation.token_ids) >= self.longest or completion.finish_reason == "abort"
                if cut or turn == self.options.max_turns - 1:
                    break
                [call] = self.pool.submit([ToolCall(tuple(conversation.texts), prompt.metadata)])
                answer = await asyncio.wrap_future(call)
                if not answer.valid:
                    detail = answer.detail
                    break
                if answer.text is None or not self._observe(conversation, answer.text):
                    break
            deliver(self._trajectory(conversation, detail))

        generations.run(len(wanted), trajectory)

    def _add_turn(self, conversation: _Open, completion: Completion) -> None:
        text = self.tokenizer.decode(completion.token_ids)
        if not conversation.turns:
            conversation.version = self.engine.version
        conversation.turns.append(text)
        conversation.texts.append(text)
        conversation.token_ids += completion.token_ids
        conversation.log_probs += completion.log_probs
        conversation.observed += [False] * len(completion.token_ids)
        conversation.finish_reason = completion.finish_reason

    def _observe(self, conversation: _Open, answer: str) -> bool:
        """Adds the tool's answer. False: no token would be left for another turn, so the response ends here."""
        text, tokens = self._observation(answer, ended=conversation.token_ids[-1] in self.tokenizer.eos_token_ids)
        if len(conversation.token_ids) + len(tokens) >= self.longest:
            conversation.finish_reason = "length"
            return False
        conversation.texts.append(text)
        conversation.token_ids += tokens
        conversation.log_probs += [0.0] * len(tokens)
        conversation.observed += [True] * len(tokens)
        conversation.observations += 1
        return True

    def _observation(self, text: str, ended: bool) -> tuple[str, list[int]]:
        """Returns the text, cut if it is too long, and its tokens with those that the chat template adds."""
        bare = self.tokenizer.observation(text, chat=False, ended=ended)
        if len(bare) > self.options.max_observation_tokens:
            bare = bare[: self.options.max_observation_tokens]
            text = self.tokenizer.decode(bare)
        return text, self.tokenizer.observation(text, chat=True, ended=ended) if self.chat else bare

    def _trajectory(self, conversation: _Open, failure: str) -> Trajectory:
        failed = bool(failure)
        return Trajectory(
            conversation.prompt,
            conversation.sample,
            tuple(conversation.token_ids),
            tuple(conversation.log_probs),
            conversation.finish_reason,
            conversation.version,
            self.tokenizer.decode(conversation.token_ids),
            valid=not failed,
            conversation=Conversation(
                tuple(conversation.turns), tuple(conversation.observed), conversation.observations, failed
            ),
            outcome=f"rollout.multi_turn.tool {self.options.tool} failed" if failed else "",
            verdict=failure,
        )
