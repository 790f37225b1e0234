"""Builds embodied policies from config and spaces, and lists combinations that do not fit together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import VLM_POLICIES, Model
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.models.forward import EmbodiedActorCritic
from rl_platform.models.network import build_network, check_network
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig
from rl_platform.models.squash import Squash
from rl_platform.models.vision import ImageEncoder, ImageLayout
from rl_platform.user_code import is_named

if TYPE_CHECKING:
    from torch import nn

    from rl_platform.models.policies.recurrent_policy import RecurrentPolicy
    from rl_platform.models.policies.vla import VisionLanguagePolicy
    from rl_platform.models.vlas.flow_policy import FlowPolicy

    EmbodiedPolicy = ActorCriticPolicy | RecurrentPolicy | VisionLanguagePolicy | FlowPolicy


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
    squashed = model.action_distribution == "squashed"
    config = PolicyConfig(
        hidden_sizes=model.hidden_sizes,
        activation=model.activation,
        initial_log_std=model.initial_log_std,
        log_std=model.log_std,
        squash=Squash(spaces.action_low, spaces.action_high) if squashed else None,
        network=build_network(model.type, spaces, model.kwargs) if is_named(model.type) else None,
        encoder=ImageEncoder(spaces.observation_shape, model.cnn) if model.type == "cnn" else None,
        recurrent_size=model.recurrent_size,
        num_actions=levels.num_actions,
        num_values=levels.values,
    )
    shape, actions = (spaces.observation_size,), spaces.action
    if model.type == "gru":
        from rl_platform.models.policies.recurrent_policy import RecurrentPolicy

        return RecurrentPolicy(shape, actions, config)
    if levels.single:
        return ActorCriticPolicy(shape, actions, config)
    from rl_platform.models.policies.chunk_policy import ChunkPolicy

    return ChunkPolicy(shape, actions, config)


def trainable(policy: EmbodiedPolicy, levels: ActionLevels) -> nn.Module:
    """Returns the policy as training engines call it, see `forward.py`."""
    if hasattr(policy, "actor_critic"):
        return policy.actor_critic(levels)
    if isinstance(policy, ActorCriticPolicy) and levels.single:
        return EmbodiedActorCritic(policy)
    from rl_platform.models.policies.chunk_policy import ChunkActorCritic, ChunkPolicy
    from rl_platform.models.policies.recurrent_policy import RecurrentActorCritic, RecurrentPolicy

    if isinstance(policy, RecurrentPolicy):
        return RecurrentActorCritic(policy)
    return ChunkActorCritic(policy, levels) if isinstance(policy, ChunkPolicy) else EmbodiedActorCritic(policy)


def policy_problems(model: Model, spaces: EnvSpaces) -> list[Problem]:
    """Returns a problem for each setting of `model` that these observation and action spaces do not allow."""
    if model.type in VLM_POLICIES:
        with required("rl_platform.models.vlas", "actor.model.type"):
            from rl_platform.models.vlas.inputs import space_problems

        return space_problems(model, spaces)
    problems = _action_problems(model, spaces)
    if is_named(model.type):
        try:
            check_network(model.type, spaces, model.kwargs)
        except ConfigError as error:
            problems += error.problems
    if model.type == "mlp" or is_named(model.type):
        return problems
    if model.type == "gru":
        if spaces.images:
            message = "a recurrent policy observes numbers, and the environment gives images"
            problems.append(Problem("actor.model.type", message, value="gru", hint="actor.model.type: cnn"))
        return problems
    if not spaces.images:
        message = f"{model.type} needs images, and the environment observes none"
        allowed = "uint8 images: height x width x channels, or a stack of them"
        hint = "env.pixels has a MuJoCo environment drawn; else actor.model.type: mlp"
        observed = f"shape {spaces.observation_shape}, {spaces.observation_dtype}"
        return [*problems, Problem("actor.model.type", message, value=observed, allowed=allowed, hint=hint)]
    size = ImageLayout(spaces.observation_shape).height_and_width
    if min(model.cnn.map_sizes(*size)[-1]) < 1:
        message = f"images of {size[0]} x {size[1]} are too small for these windows"
        hint = "smaller kernels or strides, fewer layers, or larger images"
        problems.append(Problem("actor.model.cnn", message, value=str(model.cnn.model_dump()), hint=hint))
    return problems


def _action_problems(model: Model, spaces: EnvSpaces) -> list[Problem]:
    problems = []
    key, squashed = "actor.model.action_distribution", model.action_distribution == "squashed"
    if spaces.action.kind == "multi_discrete" and model.type == "vla":
        message = "vla chooses numbers or one of several actions, and the environment takes several choices at once"
        problems.append(Problem("actor.model.type", message, value="vla", hint="actor.model.type: cnn"))
    if spaces.action.kind != "continuous":
        reason = "actions are choices of a categorical distribution, which has no deviation"
        if squashed:
            problems.append(Problem(key, reason, value="squashed", allowed="gaussian, which means nothing here"))
        if model.log_std == "state":
            problems.append(Problem("actor.model.log_std", reason, value="state", allowed="free, which means nothing"))
        initial, default = model.initial_log_std, type(model).model_fields["initial_log_std"].default
        if initial != default:
            key = "actor.model.initial_log_std"
            hint = f"remove it; an inherited one: ~{key} on the command line, {key}: !unset in a file"
            problems.append(Problem(key, f"has no effect here: {reason}", value=str(initial), hint=hint))
        return problems
    bounds = (*spaces.action_low, *spaces.action_high)
    if (squashed or model.type == "vla") and not all(map(math.isfinite, bounds)):
        key, value = (key, "squashed") if squashed else ("actor.model.type", "vla")
        message = "actions are placed between their bounds, and some of the environment's have none"
        problems.append(Problem(key, message, value=value, hint="wrap it so that they are bounded"))
    return problems
