"""The reference: the frozen policy whose log-probabilities the KL terms compare to."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_platform.components.base import ComponentContext
from rl_platform.components.learner import present
from rl_platform.components.some_rows import SomeRows
from rl_platform.config.schema import Config
from rl_platform.engines.offload import Swap
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.fsdp import autocast, evaluate
from rl_platform.engines.training.sharing import hidden_size_of, shares
from rl_platform.models.build import language_model, token_temperature
from rl_platform.models.forward import TokenPolicy
from rl_platform.records import RolloutBatch


class LanguageReference:
    """Holds parameters only: no gradients, no optimizer. Several ranks share the rows and need not talk to each other:
    `of_all_rows` puts their answers together."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        self.rank, self.world_size = context.rank, context.world_size
        section = config.reference.model or config.actor.model
        self.device = torch.device("cuda", context.accelerators[0]) if context.accelerators else torch.device("cpu")
        self.full_kl = config.algorithm.full_kl_in_reward or config.algorithm.full_kl_in_loss
        language = language_model(config, section, context.seed)
        model = TokenPolicy(language, token_temperature(config), keep_states=self.full_kl)
        self.model = model.requires_grad_(False).to(self.device)
        self.precision = autocast(self.device, getattr(torch, section.dtype))
        self.swap = Swap(self.model.parameters, self.device, constant=True)
        if config.reference.offload is True:
            self.swap.leave()
        rows = config.algorithm.logprob_forward_micro_batch_size or config.actor.micro_batch_size
        self.micro_batches = MicroBatches(rows, None if rows else config.actor.max_tokens_per_micro_batch)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Tensor] | SomeRows:
        """The batch's `reference_log_probs` [B,T], and `reference_states` [B,T,H] if a KL is `full`; of several ranks
        each has those of its own rows."""
        if self.world_size == 1:
            return self._evaluate(batch)
        width = hidden_size_of(self.model)
        (own,) = shares(batch, MicroBatches(), self.rank, self.world_size, width)
        rows = torch.tensor(own, dtype=torch.int64)
        return SomeRows(rows, self._evaluate(batch.select(rows)) if own else {})

    def _evaluate(self, batch: RolloutBatch) -> dict[str, Tensor]:
        self.swap.enter()
        with self.precision:
            outputs = evaluate(self.model, batch, self.micro_batches, self.device)
        fields = {"reference_log_probs": present(outputs.log_probs)}
        return fields | ({"reference_states": present(outputs.states)} if self.full_kl else {})

    def offload(self, weights: bool) -> None:
        """Leave the device until the next evaluation: there is nothing but weights."""
        if weights:
            self.swap.leave()

    def head(self) -> Tensor:
        """The output matrix [vocabulary, H], which makes logits of `reference_states`; by reference in one process."""
        return self.model.model.head.weight
