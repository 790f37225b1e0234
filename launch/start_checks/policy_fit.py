"""Finds the settings of an embodied policy that the spaces of an environment do not allow.

Imports torch only for networks of users, images and policies on vision-language models, so that a plan is quick.
"""

from __future__ import annotations

import math

from rl_platform.config.schema.models import VLM_POLICIES, Model
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.user_code import is_named


def policy_problems(model: Model, spaces: EnvSpaces) -> list[Problem]:
    """Returns a problem for each setting of `model` that these observation and action spaces do not allow."""
    if model.type in VLM_POLICIES:
        with required("rl_platform.models.vlas", "actor.model.type"):
            from rl_platform.models.vlas.inputs import space_problems

        return _among_parts(model, spaces) or space_problems(model, spaces)
    problems = [*_action_problems(model, spaces), *_among_parts(model, spaces)]
    if is_named(model.type):
        from rl_platform.models.policies.network import check_network

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
    if spaces.image_parts and model.type != "cnn":
        return problems
    shapes = [part.shape for part in spaces.image_parts] or [spaces.observation_shape] * spaces.images
    if not shapes:
        message = f"{model.type} needs images, and the environment observes none"
        allowed = "uint8 images: height x width x channels, or a stack of them"
        hint = "env.pixels has a MuJoCo environment drawn; else actor.model.type: mlp"
        observed = f"shape {spaces.observation_shape}, {spaces.observation_dtype}"
        return [*problems, Problem("actor.model.type", message, value=observed, allowed=allowed, hint=hint)]
    with required("rl_platform.models.policies", "actor.model.type"):
        from rl_platform.models.policies.vision import ImageLayout

    size = min((ImageLayout(shape).height_and_width for shape in shapes), key=min)
    if min(model.cnn.map_sizes(*size)[-1]) < 1:
        message = f"images of {size[0]} x {size[1]} are too small for these windows"
        hint = "smaller kernels or strides, fewer layers, or larger images"
        problems.append(Problem("actor.model.cnn", message, value=str(model.cnn.model_dump()), hint=hint))
    return problems


def _among_parts(model: Model, spaces: EnvSpaces) -> list[Problem]:
    """Returns the problem of a policy that does not read images among other parts."""
    if not spaces.image_parts or model.type == "cnn" or is_named(model.type):
        return []
    names, key = ", ".join(part.name for part in spaces.image_parts), "actor.model.type"
    message = f"the environment observes images among other parts ({names}), which {model.type} does not read"
    return [Problem(key, message, value=model.type, allowed="cnn, a class of yours", hint=f"{key}: cnn")]


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
    equal = [i for i, (low, high) in enumerate(zip(spaces.action_low, spaces.action_high, strict=True)) if low == high]
    if squashed and equal:
        message = f"actions are placed between their bounds, and both of component {equal[0]} are equal"
        hint = "wrap the environment so that the policy chooses the other components only, or gaussian"
        problems.append(Problem(key, message, value="squashed", hint=hint))
    return problems
