"""The reference: the frozen policy whose log-probabilities the KL terms compare to."""

from __future__ import annotations

from torch import Tensor

from rl_platform.components.learner import Evaluator, present
from rl_platform.config.schema import Config
from rl_platform.models.build import language_model, token_temperature
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.tokenizer import check_same_tokens, load_tokenizer
from rl_platform.records import RolloutBatch
from rl_platform.runtime.host import ComponentContext


class LanguageReference(Evaluator):
    """Computes log-probabilities as the actor does, in the actor's layout unless it has one of its own. It holds
    parameters only: no gradients, no optimizer."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        section = config.reference_section
        self.full_kl = config.algorithm.full_kl
        if config.algorithm.distillation_coef and context.rank == 0:
            check_same_tokens(load_tokenizer(config.actor.model), load_tokenizer(section.model), "reference.model")
        probed = config.reference.model is not None and context.rank == 0  # the actor's model is probed there
        language = language_model(config, section.model, context.seed, probed=probed)
        policy = TokenPolicy(language, token_temperature(config), keep_states=self.full_kl)
        super().__init__(context, config, section, policy.requires_grad_(False))

    def evaluate(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Returns the batch's `reference_log_probs` [B,T], and `reference_states` [B,T,H] if a KL is `full`."""
        outputs = self.outputs(batch)
        fields = {"reference_log_probs": present(outputs.log_probs)}
        return fields | ({"reference_states": present(outputs.states)} if self.full_kl else {})

    def head(self) -> Tensor:
        """Returns the output matrix [vocabulary, H], which turns `reference_states` into logits. Called on all ranks.

        In one process it is a reference.
        """
        return self.engine.weights()["model.head.weight"]
