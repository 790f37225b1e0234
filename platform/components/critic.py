"""The separate critic: a language model with a scalar head, trained on returns. `critic.use_critic_model: true`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_platform.algorithms.losses import critic_loss
from rl_platform.components.learner import Learner, present
from rl_platform.config.schema import Config
from rl_platform.models.build import language_model
from rl_platform.models.forward import TokenValues
from rl_platform.records import RolloutBatch
from rl_platform.runtime.host import ComponentContext


class LanguageCritic(Learner):
    """Starts from the actor's weights unless `critic.model` names others; its head starts at zero, so do its values."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        section = config.critic
        probed = section.model is not None and context.rank == 0  # the actor's model is probed there
        start = section.model or config.actor.model
        model = TokenValues(
            language_model(config, start, context.seed, value_head=True, lora=section.lora, probed=probed)
        )
        loss = partial(critic_loss, algorithm=config.algorithm)
        super().__init__(context, config, section, model, loss, "critic", config.algorithm.critic_epochs)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Returns the batch's `values` [B,T] of the present critic, and `end_values` [B,T] where it is bootstrapped."""
        if batch.bootstrapped is None:
            return {"values": present(self.outputs(batch).values)}
        # one position more: the value of the state that follows the last token
        mask = F.pad(batch.action_mask, (0, 1)) | F.pad(batch.bootstrapped, (1, 0))
        unused = torch.zeros(mask.shape)
        extended = RolloutBatch(batch.inputs, mask, batch.sample_mask, batch.group_ids, unused, unused)
        values = present(self.outputs(extended).values)
        return {
            "values": torch.where(batch.action_mask, values[:, :-1], 0.0),
            "end_values": torch.where(batch.bootstrapped, values[:, 1:], 0.0),
        }
