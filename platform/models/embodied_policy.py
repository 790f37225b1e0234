"""Builds embodied policies from config and spaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import VLM_POLICIES, Model
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.extras import required
from rl_platform.models.forward import EmbodiedActorCritic
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.user_code import is_named

if TYPE_CHECKING:
    from torch import nn

    from rl_platform.models.policies.recurrent_policy import RecurrentPolicy
    from rl_platform.models.policies.squash import Squash
    from rl_platform.models.policies.vision import ImageEncoder, PartsEncoder
    from rl_platform.models.policies.vla import VisionLanguagePolicy
    from rl_platform.models.vlas.action_token_policy import ActionTokenPolicy
    from rl_platform.models.vlas.flow_policy import FlowPolicy

    EmbodiedPolicy = ActorCriticPolicy | RecurrentPolicy | VisionLanguagePolicy | FlowPolicy | ActionTokenPolicy


def build_policy(
    model: Model, spaces: EnvSpaces, levels: ActionLevels, seed: int, instructions: Sequence[str] = ()
) -> EmbodiedPolicy:
    """Returns the policy of section `model`.

    A random language model depends on `seed`; all other new parameters are drawn from torch's global generator.
    `instructions`: one per task, for vision-language-action policies.
    """
    if model.type == "vla":
        from rl_platform.models.policies.vla import vision_language_policy

        return vision_language_policy(model, spaces, seed, instructions)
    if model.type in VLM_POLICIES:
        with required("rl_platform.models.vlas", "actor.model.type"):
            from rl_platform.models.vlas.build import build

        return build(model, spaces, levels, seed, instructions)
    config = PolicyConfig(
        hidden_sizes=model.hidden_sizes,
        activation=model.activation,
        initial_log_std=model.initial_log_std,
        log_std=model.log_std,
        squash=_squash(model, spaces),
        network=_network(model, spaces),
        encoder=_encoder(model, spaces),
        recurrent_size=model.recurrent_size,
        num_actions=levels.num_actions,
        num_values=levels.num_values,
    )
    shape, actions = (spaces.observation_size,), spaces.action
    if model.type == "gru":
        from rl_platform.models.policies.recurrent_policy import RecurrentPolicy

        return RecurrentPolicy(shape, actions, config)
    if levels.single:
        return ActorCriticPolicy(shape, actions, config)
    from rl_platform.models.policies.chunk_policy import ChunkPolicy

    return ChunkPolicy(shape, actions, config)


def _network(model: Model, spaces: EnvSpaces) -> nn.Module | None:
    if not is_named(model.type):
        return None
    from rl_platform.models.policies.network import build_network

    return build_network(model.type, spaces, model.kwargs)


def _encoder(model: Model, spaces: EnvSpaces) -> ImageEncoder | PartsEncoder | None:
    if model.type != "cnn":
        return None
    from rl_platform.models.policies.vision import ImageEncoder, PartsEncoder

    return ImageEncoder(spaces.observation_shape, model.cnn) if spaces.images else PartsEncoder(spaces.parts, model.cnn)


def _squash(model: Model, spaces: EnvSpaces) -> Squash | None:
    if model.action_distribution != "squashed":
        return None
    from rl_platform.models.policies.squash import Squash

    return Squash(spaces.action_low, spaces.action_high)


def trainable(policy: EmbodiedPolicy, levels: ActionLevels) -> nn.Module:
    """Returns the policy as training engines call it, see `forward.py`."""
    own: Callable[[ActionLevels], nn.Module] | None = getattr(policy, "actor_critic", None)
    if own is not None:
        return own(levels)
    if isinstance(policy, ActorCriticPolicy) and levels.single:
        return EmbodiedActorCritic(policy)
    from rl_platform.models.policies.chunk_policy import ChunkActorCritic, ChunkPolicy
    from rl_platform.models.policies.recurrent_policy import RecurrentActorCritic, RecurrentPolicy

    if isinstance(policy, RecurrentPolicy):
        return RecurrentActorCritic(policy)
    if isinstance(policy, ChunkPolicy):
        return ChunkActorCritic(policy, levels)
    return EmbodiedActorCritic(cast("VisionLanguagePolicy", policy))
