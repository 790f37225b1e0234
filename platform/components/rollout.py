"""Rollout of language models: prompts in, trajectories out, each as soon as it is finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rl_platform.components.base import ComponentContext
from rl_platform.components.conversations import Conversations
from rl_platform.components.partial_rollout import Group, generate_until, share_of
from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import Sampling
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.build import rollout_engine
from rl_platform.errors import WorkerError
from rl_platform.models.pretrained import load_config
from rl_platform.models.tokenizer import load_tokenizer, stop_tokens
from rl_platform.records import Prompt, SamplingParams, Trajectory, Weights, WeightsReceived
from rl_platform.rng import derive_seed
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.weights.group import WeightsOffer


class LanguageRollout:
    """One rank generates every world_size-th response. Weights arrive by `receive` before the first call."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self.context, self.config = context, config
        self.tokenizer = load_tokenizer(config.actor.model)
        eos = self.tokenizer.eos_token_ids
        self.ends = (*eos, *stop_tokens(self.tokenizer, config.rollout.stop))
        model_config = load_config(config.actor.model, self.tokenizer.vocab_size, eos[0])
        self.engine = rollout_engine(config, context.label, model_config, self.ends, context.accelerators, context.seed)
        self.loaded: int | None = None  # version of the weights, all of which are in the engine
        turns = config.rollout.multi_turn
        self.conversations = Conversations(context.label, config, self.engine, self.tokenizer) if turns else None

    def close(self) -> None:
        """Ends what the engine started, and the tool."""
        if self.conversations is not None:
            self.conversations.close()
        self.engine.close()

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        """Generate with these weights from now on."""
        self.loaded = None
        received = self.engine.receive(weights)
        self.loaded = received.version
        return received

    def offload(self, weights: bool) -> None:
        """Leave the device until the next use: there is nothing but weights between generations."""
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
    ) -> None:
        """`samples` responses to each prompt into `sink`, in the order they finish.

        A response's random numbers depend on the run's seed, `purpose`, `step`, the prompt, the sample and the turn
        alone: not on ranks, placement or what is generated beside it. answered: (prompt index, sample) of responses
        that are there already. Raises WorkerError unless all of weights `version` are loaded (None: of any version).
        """
        self._check_weights(version)
        everything = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        mine = _unanswered(everything, answered)[self.context.rank :: self.context.world_size]
        wanted = [everything[position] for position in mine]

        def seed(prompt: Prompt, sample: int, turn: int = 0) -> int:
            later = [turn] if turn else []
            return derive_seed(self.context.seed, "rollout", purpose, step, prompt.index, sample, *later)

        done = 0

        def deliver(trajectory: Trajectory) -> None:
            nonlocal done
            done += 1
            self.context.progress.update(done, len(wanted), "responses")
            sink.put(trajectory)

        def on_finished(completion: Completion) -> None:
            prompt, sample = wanted[completion.index]
            text = self.tokenizer.decode(completion.token_ids)
            deliver(
                Trajectory(
                    prompt,
                    sample,
                    completion.token_ids,
                    completion.log_probs,
                    completion.finish_reason,
                    self.engine.version,
                    text,
                )
            )

        if self.conversations is not None:
            self.conversations.generate(wanted, seed, self._params(sampling), deliver)
        elif wanted:
            requests = [
                Request(index, prompt.token_ids, seed(prompt, sample)) for index, (prompt, sample) in enumerate(wanted)
            ]
            self.engine.generate(requests, self._params(sampling), on_finished)

    def generate_until(
        self,
        groups: Sequence[Group],
        needed: int,
        sampling: Sampling,
        step: int,
        complete: Channel[Trajectory],
        cut: Channel[Trajectory],
        version: int | None = None,
    ) -> None:
        """Goes on with the unfinished responses of `groups` until, over all ranks, `needed` groups are complete.

        Each of them goes once into `complete`, or into `cut` as far as it got. A response draws new random numbers in
        every step. Raises WorkerError as `generate` does.
        """
        self._check_weights(version)
        share, quota = share_of(groups, needed, self.context.rank, self.context.world_size)
        total = sum(not one.complete for group in share for one in group)
        done = 0

        def seed(prompt: Prompt, sample: int) -> int:
            return derive_seed(self.context.seed, "rollout", "partial", step, prompt.index, sample)

        def deliver(found: Trajectory) -> None:
            nonlocal done
            done += 1
            self.context.progress.update(done, total, "responses")
            if found.complete:
                complete.put(replace(found, text=self.tokenizer.decode(found.token_ids)))
            else:
                cut.put(found)

        generate_until(self.engine, share, quota, self._params(sampling), self.ends, seed, deliver)

    def _check_weights(self, version: int | None) -> None:
        if self.loaded is None:
            raise WorkerError(f"{self.context.label} has no complete weights: its last receive() did not end well")
        if version not in (None, self.loaded):
            raise WorkerError(f"{self.context.label} has weights version {self.loaded}, asked for was {version}")

    def _params(self, sampling: Sampling) -> SamplingParams:
        longest = sampling.max_new_tokens or self.config.data.max_response_length
        return SamplingParams(longest, sampling.temperature, sampling.top_p, sampling.top_k)


def _unanswered(wanted: Sequence[tuple[Prompt, int]], answered: Sequence[tuple[int, int]]) -> list[int]:
    """Positions in `wanted` without a response; a prompt that stands there twice wants two."""
    there, found = Counter(answered), []
    for position, (prompt, sample) in enumerate(wanted):
        if there[prompt.index, sample]:
            there[prompt.index, sample] -= 1
        else:
            found.append(position)
    return found
