"""Rollout of language models: prompts in, trajectories out, each as soon as it is finished."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_platform.components.base import ComponentContext
from rl_platform.config.components import Sampling
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.pretrained import load_config
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.records import Prompt, SamplingParams, Trajectory, Weights, WeightsReceived
from rl_platform.rng import derive_seed
from rl_platform.runtime.channel import Channel


class LanguageRollout:
    """One rank generates every world_size-th response. Weights arrive by `receive` before the first call."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self.context, self.config = context, config
        self.tokenizer = load_tokenizer(config.actor.model)
        device = torch.device("cuda", context.accelerators[0]) if context.accelerators else torch.device("cpu")
        eos = self.tokenizer.eos_token_ids
        model_config = load_config(config.actor.model, self.tokenizer.vocab_size, eos[0])
        self.engine = TorchRolloutEngine(model_config, eos, config.rollout.max_running_requests, device)

    def receive(self, weights: Weights) -> WeightsReceived:
        """Generate with these weights from now on."""
        self.engine.receive(weights)
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        purpose: str,
        step: int,
        sink: Channel[Trajectory],
    ) -> None:
        """`samples` responses to each prompt into `sink`, in the order they finish.

        A response's random numbers depend on the run's seed, `purpose`, `step`, the prompt and the sample alone: not on
        ranks, placement or what is generated beside it.
        """
        wanted = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        requests = [
            Request(
                index, prompt.token_ids, derive_seed(self.context.seed, "rollout", purpose, step, prompt.index, sample)
            )
            for index, (prompt, sample) in enumerate(wanted)
            if index % self.context.world_size == self.context.rank
        ]

        done = 0

        def deliver(completion: Completion) -> None:
            nonlocal done
            done += 1
            self.context.progress.update(done, len(requests), "responses")
            prompt, sample = wanted[completion.index]
            text = self.tokenizer.decode(completion.token_ids)
            sink.put(
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

        if requests:
            self.engine.generate(requests, self._params(sampling), deliver)

    def _params(self, sampling: Sampling) -> SamplingParams:
        longest = sampling.max_new_tokens or self.config.data.max_response_length
        return SamplingParams(longest, sampling.temperature, sampling.top_p, sampling.top_k)
