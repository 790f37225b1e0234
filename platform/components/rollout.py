"""Rollout of language models: prompts in, trajectories out, each as soon as it is finished.

`generate` completes all responses. `generate_until` stops when enough prompts are complete; the other responses go on
in a later call (`runners/collection/`). Responses of several turns, and agents, are in `agents/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import Sampling
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.build import rollout_engine
from rl_platform.errors import ChannelClosed, WorkerError
from rl_platform.extras import required
from rl_platform.models.causal_lm import load_config
from rl_platform.models.tokenizer import load_tokenizer, stops
from rl_platform.records import Prompt, SamplingParams, Trajectory, Weights, WeightsReceived, numbered
from rl_platform.rng import derive_seed
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentContext

if TYPE_CHECKING:
    from rl_platform.components.agents.agent_runs import AgentRuns
    from rl_platform.components.agents.conversations import Conversations
    from rl_platform.runtime.weights.group import WeightsOffer

AGENTS = "rl_platform.components.agents"  # an extra
NO_DEADLINE_S = 1e8  # training may take any time until it publishes weights
Group = Sequence[Trajectory]  # the responses to one prompt, complete or not


class LanguageRollout:
    """One rank generates every world_size-th response. Weights arrive by `receive` before the first call."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self.context, self.config = context, config
        self.tokenizer = load_tokenizer(config.actor.model)
        eos = self.tokenizer.eos_token_ids
        tokens, texts = stops(self.tokenizer, config.rollout.stop)
        self.ends = (*eos, *tokens)
        stop_texts: StopTexts | None = None
        if texts:
            with required("rl_platform.engines.rollout.stopping", "rollout.stop"):
                from rl_platform.engines.rollout.stopping.stop_texts import StopTexts

            stop_texts = StopTexts(texts, self.tokenizer.decode)
        model_config = load_config(config.actor.model, self.tokenizer.vocab_size, eos[0])
        self.engine = rollout_engine(
            config, context.label, model_config, self.ends, context.accelerators, context.seed, stop_texts
        )
        self.loaded: int | None = None  # version of the weights in the engine; None: they are not complete
        self.conversations: Conversations | AgentRuns | None = None
        if config.rollout.multi_turn:
            with required(AGENTS, "rollout.multi_turn"):
                from rl_platform.components.agents.conversations import Conversations

            self.conversations = Conversations(config, self.engine, self.tokenizer)
        if config.rollout.agent:
            with required(AGENTS, "rollout.agent"):
                from rl_platform.components.agents.agent_runs import AgentRuns

            self.conversations = AgentRuns(config, self.engine, self.tokenizer)

    def close(self) -> None:
        """Ends the processes of the engine, and of the tool or the agents."""
        if self.conversations is not None:
            self.conversations.close()
        self.engine.close()

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        """Loads these weights; later responses are generated with them."""
        self.loaded = None
        received = self.engine.receive(weights)
        self.loaded = received.version
        return received

    def offload(self, weights: bool) -> None:
        """Moves the weights off the device until the next use. Between generations there is nothing else to move."""
        if weights:
            self.engine.offload()

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        purpose: str,
        step: int,
        sink: Channel[Trajectory],
        version: int | None = None,
        answered: Sequence[tuple[int, int]] = (),
        updates: Channel[Weights | WeightsOffer] | None = None,
    ) -> None:
        """Generates `samples` responses to each prompt and puts them into `sink` in the order they finish.

        A response's random numbers depend on the run's seed, `purpose`, `step`, the prompt, the sample and the turn
        alone, not on ranks, placement or other responses. answered: (prompt index, sample) of responses
        that exist already. updates: newer weights for this rank, under its number as key, until it is closed; see
        `rollout.on_update`. Raises WorkerError unless all of weights `version` are loaded (None: of any version).
        """
        self._check_weights(version)
        there = set(answered)
        left = [
            (prompt, sample) for prompt, sample in numbered(prompts, samples) if (prompt.index, sample) not in there
        ]
        wanted = left[self.context.rank :: self.context.world_size]

        def seed(prompt: Prompt, sample: int, turn: int | str = 0, *more: int) -> int:
            later = [turn] if turn else []
            return derive_seed(self.context.seed, "rollout", purpose, step, prompt.index, sample, *later, *more)

        done = 0

        def deliver(trajectory: Trajectory) -> None:
            nonlocal done
            done += 1
            self.context.progress.update(done, len(wanted), "responses")
            sink.put(trajectory)

        def on_finished(completion: Completion) -> None:
            prompt, sample = wanted[completion.index]
            text, segments = self.tokenizer.decode(completion.token_ids), completion.segments
            deliver(
                Trajectory(
                    prompt,
                    sample,
                    completion.token_ids,
                    completion.log_probs,
                    completion.finish_reason,
                    segments[0][0] if segments else self.engine.version,
                    text,
                    segments=segments if len(segments) > 1 else (),
                    routes=completion.routes,
                )
            )

        with nullcontext() if updates is None else self._receiving(updates):
            if self.conversations is not None:
                self.conversations.generate(wanted, seed, self._params(sampling), deliver)
            elif wanted:
                requests = [
                    Request(index, prompt.token_ids, seed(prompt, sample))
                    for index, (prompt, sample) in enumerate(wanted)
                ]
                self.engine.generate(requests, self._params(sampling), on_finished)

    @contextmanager
    def _receiving(self, updates: Channel[Weights | WeightsOffer]) -> Iterator[None]:
        """Loads weights as they arrive. Ends when the channel is closed; raises the error of a load."""

        def receive() -> None:
            with suppress(ChannelClosed):
                while True:
                    self.receive(updates.get(key=self.context.rank, timeout=NO_DEADLINE_S))

        with ThreadPoolExecutor(1, thread_name_prefix=f"{self.context.label}-weights") as executor:
            receiving = executor.submit(receive)
            try:
                yield
            except BaseException:
                updates.close()  # no other thread closes it, and the wait below would not end
                raise
            receiving.result()

    def generate_until(
        self,
        groups: Sequence[Group],
        needed: int,
        sampling: Sampling,
        step: int,
        complete: Channel[Trajectory],
        cut: Channel[Trajectory],
        version: int | None,
    ) -> None:
        """Goes on with the unfinished responses of `groups` until, over all ranks, `needed` groups are complete.

        Each of them goes once into `complete`, or into `cut` as far as it got. A response draws new random numbers in
        every step. Raises WorkerError as `generate` does.
        """
        from rl_platform.runners.collection.cut_generation import generate_until, share_of

        self._check_weights(version)
        share, quota = share_of(groups, needed, self.context.rank, self.context.world_size)
        total = sum(not one.complete for group in share for one in group)
        done = 0

        def seed(prompt: Prompt, sample: int) -> int:
            return derive_seed(self.context.seed, "rollout", "partial", step, prompt.index, sample)

        def deliver(trajectory: Trajectory) -> None:
            nonlocal done
            done += 1
            self.context.progress.update(done, total, "responses")
            if trajectory.complete:
                complete.put(replace(trajectory, text=self.tokenizer.decode(trajectory.token_ids)))
            else:
                cut.put(trajectory)

        generate_until(self.engine, share, quota, self._params(sampling), self.ends, seed, deliver)

    def _check_weights(self, version: int | None) -> None:
        if self.loaded is None:
            raise WorkerError(f"{self.context.label} has no complete weights: its last receive() did not end well")
        if version not in (None, self.loaded):
            raise WorkerError(f"{self.context.label} has weights version {self.loaded}, requested was {version}")

    def _params(self, sampling: Sampling) -> SamplingParams:
        longest = sampling.max_new_tokens or self.config.data.max_response_length
        return SamplingParams(longest, sampling.temperature, sampling.top_p, sampling.top_k)
