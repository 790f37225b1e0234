"""The actor: the policy that learns. A language model, or an embodied policy with the value head on its backbone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from rl_platform import acceleration
from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.algorithms.losses import actor_critic_loss, actor_loss
from rl_platform.components.learner import Learner, present
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import estimator_needs
from rl_platform.disk import replacing
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.models.build import language_model, token_temperature
from rl_platform.models.causal_lm import export_causal_lm
from rl_platform.models.embodied_policy import build_policy, trainable
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.saved_policy import Normalizer, PolicyDescription, SavedPolicy, language_of
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.records import RolloutBatch, StateDict
from rl_platform.rng import derive_seed
from rl_platform.runtime.cpu import compute_alone
from rl_platform.runtime.host import ComponentContext

if TYPE_CHECKING:
    from rl_platform.components.demonstrations.cloning import Cloning
    from rl_platform.models.embodied_policy import EmbodiedPolicy


class LanguageActor(Learner):
    """Policy loss on sampled tokens. `loss_type: actor`."""

    def __init__(self, context: ComponentContext, config: Config) -> None:
        model = TokenPolicy(
            language_model(config, config.actor.model, context.seed, lora=config.actor.lora, probed=context.rank == 0),
            token_temperature(config),
            entropy_gradient=config.algorithm.entropy_bonus > 0,
            squared_probs=estimator_needs(config.algorithm.adv_type).squared_probs,
            router_replay=config.actor.router_replay,
        )
        loss = partial(actor_loss, algorithm=config.algorithm)
        super().__init__(context, config, config.actor, model, loss, "actor", config.algorithm.ppo_epochs)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Returns the batch's `log_probs` [B,T] under the present policy, `full_kl` [B,T] if the reward reads it, and
        `squared_probs` [B,T] if the estimator does."""
        full_kl = self.config.algorithm.full_kl_in_reward
        outputs = self.outputs(batch if full_kl else replace(batch, reference_states=None))
        fields = {"log_probs": present(outputs.log_probs)}
        if outputs.squared_probs is not None:
            fields["squared_probs"] = outputs.squared_probs
        return fields | ({"full_kl": present(outputs.full_kl)} if full_kl else {})

    def evaluate_reference(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Evaluates the reference, which is the actor's model without its adapters: the policy before training.

        Returns the batch's `reference_log_probs` [B,T], and `reference_states` [B,T,H] if a KL is `full`.
        """
        from rl_platform.models.adapters.lora import without_adapters

        policy = self.engine.model
        full_kl = self.config.algorithm.full_kl
        with without_adapters(policy), keeping_states(policy, full_kl):
            outputs = self.outputs(batch)
        fields = {"reference_log_probs": present(outputs.log_probs)}
        return fields | ({"reference_states": present(outputs.states)} if full_kl else {})

    def receive_reference_head(self, head: Tensor) -> None:
        """Stores the reference's output matrix [vocabulary, H], once before the first batch of a run with a `full` KL.

        Raises ConfigError if the reference has another vocabulary.
        """
        policy = self.engine.model
        own = policy.model.head.weight.shape[0]
        if head.shape[0] != own:
            message = f"a full KL compares all tokens: the reference has {head.shape[0]} of them, the actor {own}"
            raise ConfigError([Problem("reference.model", message, allowed="a model with the actor's vocabulary")])
        policy.reference_head = head.detach().to(self.device)

    def export(self, folder: str) -> str:
        """Writes the model and its tokenizer as a Hugging Face folder that transformers loads. Called on all ranks."""
        weights = self.whole_weights()
        if self.context.rank == 0:
            tokenizer = load_tokenizer(self.config.actor.model)
            with replacing(Path(folder)) as stage:
                export_causal_lm(weights, self.engine.model.model.config, tokenizer, stage)
        return folder


class EmbodiedActor(Learner):
    """Policy and value loss in one backward (`loss_type: actor_critic`), or the policy loss alone (`actor`)."""

    def __init__(self, context: ComponentContext, config: Config, spaces: EnvSpaces) -> None:
        policy, self.spaces = trained_policy(config, spaces, context.seed), spaces
        model = trainable(policy, action_levels(config, spaces))
        losses = actor_critic_loss if config.has_values else actor_loss
        loss = partial(losses, algorithm=config.algorithm)
        super().__init__(context, config, config.actor, model, loss, "actor", config.algorithm.ppo_epochs)
        self.cloning: Cloning | None = None
        if config.runner.warm_start is not None:
            self.cloning = demonstrations_of(config, spaces, context.seed)
            self.loss = self.cloning.loss(self.loss, self.engine.model)
        if acceleration.find("fastest_alone", self.engine, config.data.mini_batch_size):
            compute_alone()

    def warm_start(self) -> dict[str, float]:
        """Clones the demonstrations of `runner.warm_start` and returns metrics. Called on all ranks."""
        assert self.cloning is not None
        return self.cloning.train(self.engine, self.training_micro_batches, self.context.progress.update)

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        return super().update(batch if self.cloning is None else self.cloning.beside(batch, step), step)

    def evaluate(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Returns the batch's `log_probs` [B,T]. If values are trained, also `values`, and the `end_values` of the
        states after ends."""
        recurrent = "hidden_states" in batch.inputs
        with keeping_states(self.engine.model, recurrent):
            outputs = self.outputs(batch)
        if not self.config.has_values:
            return {"log_probs": present(outputs.log_probs)}
        bootstrapped, following = present(batch.bootstrapped), present(batch.end_observations)
        end_values = torch.zeros(batch.action_mask.shape)
        if bool(bootstrapped.any()):
            width = bootstrapped.shape[1] // following.shape[1]  # positions of a choice; it ends at the last of them
            ended = bootstrapped[:, width - 1 :: width]
            choices = {name: tensor for name, tensor in batch.inputs.items() if name != "hidden_states"}
            rows = replace(batch, inputs=choices).flatten().select(ended.flatten().nonzero().squeeze(1))
            rows.inputs["observations"] = following[ended][:, None]
            if recurrent:  # the hidden state after the last step of the episode
                rows.inputs["hidden_states"] = present(outputs.states)[ended][:, None]
                rows.inputs["episode_starts"] = torch.zeros(len(rows), 1, dtype=torch.bool)
            end_values[bootstrapped] = present(self.outputs(rows).values)[:, 0]
        return {"log_probs": present(outputs.log_probs), "values": present(outputs.values), "end_values": end_values}

    def export(self, folder: str, step: int, normalizer: StateDict | None) -> str:
        """Writes the policy of `step` as a folder that `load_policy` loads. Called on all ranks.

        normalizer: the state of the observation normaliser, None without one.
        """
        weights = self.whole_weights()
        if self.context.rank == 0:
            saved = saved_policy(self.config, self.spaces, self.engine.model.model, weights, step, normalizer)
            with replacing(Path(folder)) as stage:
                saved.write(stage)
        return folder


class KeepsStates(Protocol):
    keep_states: bool


@contextmanager
def keeping_states(model: KeepsStates, keep: bool) -> Iterator[None]:
    """Makes the outputs of the model contain its hidden states within the block, if `keep`."""
    model.keep_states = keep
    try:
        yield
    finally:
        model.keep_states = False


def action_levels(config: Config, spaces: EnvSpaces) -> ActionLevels:
    """Returns the levels of the config for the actions of these spaces."""
    return ActionLevels.of(config.algorithm, config.actor.model.num_action_chunks, spaces.action.components)


def demonstrations_of(config: Config, spaces: EnvSpaces, seed: int) -> Cloning:
    """Returns the demonstrations of `runner.warm_start`. Raises ConfigError if they do not fit the spaces."""
    with required("rl_platform.components.demonstrations", "runner.warm_start"):
        from rl_platform.components.demonstrations.cloning import Cloning

    return Cloning(config, spaces, seed)


def embodied_policy(config: Config, spaces: EnvSpaces, seed: int) -> EmbodiedPolicy:
    """Returns the policy of an embodied run. Equal seeds give equal policies."""
    derived = derive_seed(seed, "actor", "model")
    with required("rl_platform.models.policies", "actor.model"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived)
        return build_policy(config.actor.model, spaces, action_levels(config, spaces), derived, config.instructions)


def trained_policy(config: Config, spaces: EnvSpaces, seed: int) -> EmbodiedPolicy:
    """Returns the policy that an embodied run trains, with its adapters. The rollout receives merged weights."""
    policy = embodied_policy(config, spaces, seed)
    if config.actor.lora is not None:  # of a policy on a language model
        from rl_platform.models.adapters.lora import add_adapters

        add_adapters(cast(nn.Module, policy.adapted), config.actor.lora, derive_seed(seed, "lora"), "actor.lora")
    return policy


def saved_policy(
    config: Config,
    spaces: EnvSpaces,
    policy: EmbodiedPolicy,
    weights: dict[str, Tensor],
    step: int,
    normalizer: StateDict | None,
) -> SavedPolicy:
    """Returns the policy of a run after `step`, with whole weights and the state of its observation normaliser."""
    description = PolicyDescription(
        environment=config.env.name,
        step=step,
        seed=config.runner.seed,
        model=config.actor.model.model_copy(update=dict.fromkeys(("path", "random_init", "tokenizer"))),
        spaces=spaces,
        levels=action_levels(config, spaces),
        normalizer=None if normalizer is None else Normalizer(**normalizer, clip=config.env.clip_observations),
        language=language_of(policy),
        forward_rows=config.algorithm.rollout_micro_batch_size,
    )
    return SavedPolicy(description, weights)
