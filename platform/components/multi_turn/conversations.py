"""Responses of several turns: a tool or an environment answers a turn of the policy, and the policy continues.

The engine generates the next turn of every open conversation. Meanwhile the tool answers finished turns, and complete
responses are delivered at once. The engine gets all earlier tokens unchanged; sampled text is never encoded again. The
answers of the tool are part of the response, but not sampled: `Trajectory.conversation` marks their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import Completion, Request, RolloutEngine
from rl_platform.envs.reasoning.score import Score
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.tools import ToolCall, ToolSpec
from rl_platform.errors import WorkerError
from rl_platform.models.tokenizer import Tokenizer
from rl_platform.records import Conversation, Prompt, SamplingParams, Trajectory

Seed = Callable[[Prompt, int, int], int]  # of a prompt, a sample and a turn
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


@dataclass
class _GenerateCall:
    """State of one call of `Conversations.generate`."""

    deliver: Deliver
    pending: deque[tuple[_Open, Future[Score]]] = field(default_factory=deque)
    answered: list[_Open] = field(default_factory=list)  # those that go on
    failures: int = 0
    detail: str = ""


class Conversations:
    """`rollout.multi_turn` on one rank. If a tool raises, hangs or dies, its response has no reward and the run goes
    on."""

    def __init__(self, label: str, config: Config, engine: RolloutEngine, tokenizer: Tokenizer) -> None:
        assert config.rollout.multi_turn is not None
        self.label, self.engine, self.tokenizer = label, engine, tokenizer
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
        """One trajectory for every prompt and sample number, in the order they are complete.

        `sampling.max_new_tokens` bounds a turn, data.max_response_length the whole response. Raises WorkerError if the
        tool failed in every single conversation.
        """
        call = _GenerateCall(deliver)
        going = [_Open(prompt, sample, [prompt.text]) for prompt, sample in wanted]
        for turn in range(self.options.max_turns):
            if not going:
                break
            self._generate_turn(going, turn, seed, sampling, call)
            going, call.answered = sorted(call.answered, key=lambda one: (one.prompt.index, one.sample)), []
        if wanted and call.failures == len(wanted):
            raise WorkerError(
                f"{self.label}: rollout.multi_turn.tool {self.options.tool} failed in all of {call.failures} "
                f"conversations. The last one:\n{call.detail}"
            )

    def _generate_turn(
        self, going: Sequence[_Open], turn: int, seed: Seed, sampling: SamplingParams, call: _GenerateCall
    ) -> None:
        """The next turn of each; those that are not complete after it are in `call.answered`."""
        last = turn == self.options.max_turns - 1

        def on_finished(completion: Completion) -> None:
            conversation = going[completion.index]
            self._add_turn(conversation, completion)
            cut = len(conversation.token_ids) >= self.longest or completion.finish_reason == "abort"
            if last or cut:
                call.deliver(self._trajectory(conversation))
            else:
                request = ToolCall(tuple(conversation.texts), conversation.prompt.metadata)
                call.pending.append((conversation, self.pool.submit([request])[0]))
            self._take_answers(call, wait=False)

        self.engine.generate(
            [
                Request(
                    index,
                    conversation.prompt.token_ids + tuple(conversation.token_ids),
                    seed(conversation.prompt, conversation.sample, turn),
                    self.longest - len(conversation.token_ids),
                )
                for index, conversation in enumerate(going)
            ],
            sampling,
            on_finished,
        )
        self._take_answers(call, wait=True)

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

    def _take_answers(self, call: _GenerateCall, wait: bool) -> None:
        """Handles the answers of the tool so far, or with `wait` all of them."""
        for _ in range(len(call.pending)):
            conversation, future = call.pending.popleft()
            if wait or future.done():
                self._answer(conversation, future.result(), call)
            else:
                call.pending.append((conversation, future))

    def _answer(self, conversation: _Open, answer: Score, call: _GenerateCall) -> None:
        if not answer.valid:
            call.failures, call.detail = call.failures + 1, answer.detail
            call.deliver(self._trajectory(conversation, failed=True))
            return
        if answer.text is None:
            call.deliver(self._trajectory(conversation))
            return
        text, tokens = self._observation(answer.text, ended=conversation.token_ids[-1] in self.tokenizer.eos_token_ids)
        if len(conversation.token_ids) + len(tokens) >= self.longest:  # no room for another turn
            conversation.finish_reason = "length"
            call.deliver(self._trajectory(conversation))
            return
        conversation.texts.append(text)
        conversation.token_ids += tokens
        conversation.log_probs += [0.0] * len(tokens)
        conversation.observed += [True] * len(tokens)
        conversation.observations += 1
        call.answered.append(conversation)

    def _observation(self, text: str, ended: bool) -> tuple[str, list[int]]:
        """The text, cut if it is too long, and its tokens with those that the chat template adds."""
        bare = self.tokenizer.observation(text, chat=False, ended=ended)
        if len(bare) > self.options.max_observation_tokens:
            bare = bare[: self.options.max_observation_tokens]
            text = self.tokenizer.decode(bare)
        return text, self.tokenizer.observation(text, chat=True, ended=ended) if self.chat else bare

    def _trajectory(self, conversation: _Open, failed: bool = False) -> Trajectory:
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
        )
