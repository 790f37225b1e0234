"""Adapters from models to training engines: `RolloutBatch` in, `ModelOutputs` [B,T] out, a class per kind of model.

Those of recurrent policies and of action chunks are beside the policies, in `policies/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.extras import required
from rl_platform.models.language import LanguageModel, Statistic, full_kl_of_states
from rl_platform.models.packed import PackedTokens, pack
from rl_platform.models.policy import ActorCriticPolicy
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from rl_platform.models.context.context_parallel import ContextParallel
    from rl_platform.models.experts.routers import ReplayedRouters
    from rl_platform.models.policies.vla import VisionLanguagePolicy


class TokenPolicy(nn.Module):
    """Log-probabilities of the sampled tokens under a language model, at the rollout's temperature.

    `entropy_gradient` False: entropies are only logged and store nothing for the backward pass.
    `keep_states`: the outputs include the hidden states. `squared_probs`: those of an evaluation include their sums.
    `reference_head` [vocabulary,H]: the reference's output matrix, for the full KL of batches with `reference_states`;
    not in this model's state. None: the reference is this model without adapters and has the same output matrix. Both
    have the same `logit_transform`.
    `context`: the ranks that split the tokens of a batch; every rank gets whole outputs.
    `router_replay`: batches with "routes" are computed with these experts.
    """

    def __init__(
        self,
        model: LanguageModel,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        keep_states: bool = False,
        squared_probs: bool = False,
        router_replay: bool = False,
    ) -> None:
        super().__init__()
        self.entropy_gradient, self.keep_states, self.squared_probs = entropy_gradient, keep_states, squared_probs
        self.model = model
        self.hidden_size: int = model.config.hidden_size
        self.temperature = temperature
        self.reference_head: Tensor | None = None
        self.context: ContextParallel | None = None
        self.replay: ReplayedRouters | None = None
        if router_replay:
            with required("rl_platform.models.experts", "actor.router_replay"):
                from rl_platform.models.experts.routers import ReplayedRouters
            self.replay = ReplayedRouters(model.backbone)

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        packed, rows, columns = packed_rows(batch, self.context)
        if self.replay is not None:
            self.replay.begin(batch.inputs.get("routes"), packed, batch.inputs["lengths"])
        targets = batch.inputs["tokens"][rows, columns]
        wanted = self.statistic(entropy=entropy)
        states = self.model.states_before(packed, rows, columns)
        log_probs, statistic = self.model.log_probs(states, targets, self.temperature, wanted)
        full_kl = None
        if batch.reference_states is not None:
            own_head = self.model.head.weight
            head = own_head.detach() if self.reference_head is None else self.reference_head
            reference_states = batch.reference_states[rows, columns]
            heads = (own_head, reference_states, head)
            full_kl = full_kl_of_states(states, *heads, self.temperature, self.model.logit_transform)

        def placed(values: Tensor) -> Tensor:
            return _scatter(values, batch, rows, columns, self.context)

        return ModelOutputs(
            log_probs=placed(log_probs),
            full_kl=None if full_kl is None else placed(full_kl),
            states=placed(states) if self.keep_states else None,
            **({} if statistic is None else {wanted.removesuffix("_gradient"): placed(statistic)}),
        )

    def statistic(self, *, entropy: bool) -> Statistic:
        """Returns the statistic that a forward computes beside log-probs; `entropy`: it is one of training."""
        if not entropy:
            return "squared_probs" if self.squared_probs else "none"
        return "entropy_gradient" if self.entropy_gradient else "entropy"


class TokenValues(nn.Module):
    """Values of the states before the sampled tokens, from a language model with a scalar head.

    `context`: as of `TokenPolicy`.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.hidden_size: int = model.config.hidden_size
        self.context: ContextParallel | None = None

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        packed, rows, columns = packed_rows(batch, self.context)
        values = self.model.values(packed, rows, columns)
        return ModelOutputs(values=_scatter(values, batch, rows, columns, self.context))


TokenModel = TokenPolicy | TokenValues


class EmbodiedActorCritic(nn.Module):
    """Log-probabilities, entropies and values of actions from one policy with a shared backbone."""

    def __init__(self, model: ActorCriticPolicy | VisionLanguagePolicy) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        shape = batch.action_mask.shape
        observations, actions = (batch.inputs[name].flatten(0, 1) for name in ("observations", "actions"))
        more = {"tasks": batch.inputs["tasks"].flatten(0, 1)} if "tasks" in batch.inputs else {}
        log_probs, entropies, values = self.model.evaluate(observations, actions, **more)
        return ModelOutputs(log_probs.view(shape), entropies.view(shape) if entropy else None, values.view(shape))


def packed_rows(batch: RolloutBatch, context: ContextParallel | None) -> tuple[PackedTokens, Tensor, Tensor]:
    """Returns the packed sequences and (rows, columns) [K] of the action positions; with `context` this rank's part."""
    host, device = batch.host or batch, batch.action_mask.device
    rows, columns = host.action_mask.nonzero(as_tuple=True)
    packed = packed_sequences(host, device)
    if context is not None:
        packed, rows, columns = context.shared(packed, rows, columns)
    packed, (rows, columns) = packed.to(device, rows, columns)
    return packed, rows, columns


def packed_sequences(batch: RolloutBatch, device: torch.device) -> PackedTokens:
    """Packs the sequences of a batch, which is in main memory, for a forward pass on `device`."""
    tokens, lengths = batch.inputs["tokens"], batch.inputs["lengths"].tolist()
    return pack([tokens[row, :length] for row, length in enumerate(lengths)], device)


def _scatter(
    values: Tensor, batch: RolloutBatch, rows: Tensor, columns: Tensor, context: ContextParallel | None
) -> Tensor:
    """[K,...] -> [B,T,...], 0 at other positions, summed over the ranks of `context`; differentiable."""
    out = torch.zeros((*batch.action_mask.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    placed = out.index_put((rows, columns), values)
    return placed if context is None else context.whole(placed)
