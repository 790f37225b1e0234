"""Inputs and outputs of vision-language-action policies: embedded instructions, camera images, ranges of actions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.policies.vision import ImageLayout
from rl_platform.models.pretrained.model_folder import model_folder

_KEY = "actor.model.unnorm_key"


class Instructions(nn.Module):
    """Embedded tokens [T,L,H] of T instructions, frozen and padded on the right. No other token is read, so the
    embedding matrix is not stored."""

    def __init__(self, tokens: Sequence[Sequence[int]], embedding: nn.Module) -> None:
        super().__init__()
        with torch.no_grad():
            embedded = embedding(pad_sequence([torch.tensor(each) for each in tokens], batch_first=True))
        self.words = nn.Parameter(embedded.clone(), requires_grad=False)
        self.tokens = [list(each) for each in tokens]
        self.lengths = [len(each) for each in tokens]

    def forward(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embeddings [B,L,H] and mask [B,L] int64 of the instructions `tasks` [B] int64."""
        lengths = torch.tensor(self.lengths, device=tasks.device)[tasks]
        mask = torch.arange(self.words.shape[1], device=tasks.device) < lengths[:, None]
        return self.words[tasks], mask.long()


def channels_of_image(shape: tuple[int, ...]) -> int:
    """3 if the channels of these images come in threes, which are color images; else 1, for gray images."""
    return 1 if ImageLayout(shape).stack_first or shape[-1] % 3 else 3


def cameras(shape: tuple[int, ...]) -> int:
    """Returns the number of cameras in an observation of this shape; each image of a stack is one."""
    return ImageLayout(shape).channels // channels_of_image(shape)


def camera_images(
    observations: Tensor, shape: tuple[int, ...], size: tuple[int, int], *, keep_ratio: bool = False
) -> Tensor:
    """Images [B,D] uint8 -> [B,C,3,*size] float32 between -1 and 1; each image of a stack is a camera.

    keep_ratio: sides keep their ratio, and the rest at the left and at the top is black, as in LeRobot.
    """
    layout = ImageLayout(shape)
    images = layout.channels_first(observations).float() / 127.5 - 1
    images = images.unflatten(1, (-1, channels_of_image(shape))).expand(-1, -1, 3, -1, -1)
    if images.shape[-2:] == size:
        return images
    flat = images.flatten(0, 1)
    if keep_ratio:
        height, width = flat.shape[-2:]
        ratio = max(height / size[0], width / size[1])
        kept = [max(int(side / ratio), 1) for side in (height, width)]
        flat = F.interpolate(flat, kept, mode="bilinear")
        flat = F.pad(flat, (size[1] - flat.shape[-1], 0, size[0] - flat.shape[-2], 0), value=-1.0)
    else:
        flat = F.interpolate(flat, size, mode="bilinear", antialias=True)
    return flat.unflatten(0, images.shape[:2])


class ActionRange(nn.Module):
    """Maps [-1, 1] linearly to `low`..`high` [A], which are saved with the weights of the policy."""

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.tensor(each), requires_grad=False) for each in (low, high))

    def forward(self, x: Tensor) -> Tensor:
        """[...,A] -> actions [...,A]."""
        return self.low + (x + 1) / 2 * (self.high - self.low)


class StateScale(nn.Module):
    """(x - center) / scale + offset of each number of the robot's state; all [S] are saved with the policy's weights.

    offset: -1 where `center` is the least number of a range, because the middle of a narrow range would round to it.
    """

    def __init__(self, center: Sequence[float], scale: Sequence[float], offset: float = 0.0) -> None:
        super().__init__()
        ends = (center, scale, [offset] * len(scale))
        self.center, self.scale, self.offset = (nn.Parameter(torch.tensor(each), requires_grad=False) for each in ends)

    def forward(self, x: Tensor) -> Tensor:
        """[...,S] -> [...,S]."""
        return (x - self.center) / self.scale + self.offset


def action_range(model: Model, spaces: EnvSpaces) -> ActionRange:
    """Returns the range of actions: the environment's bounds, or with `unnorm_key` the statistics of a data set.

    Numbers without bounds are not scaled. The statistics are `norm_stats` in config.json of `model.path`, as OpenVLA
    stores them: q01 and q99 of each number, or min and max; a number whose `mask` is false is not scaled. Raises
    ConfigError if there are none for this key.
    """
    if model.unnorm_key is None:
        bounds = zip(spaces.action_low, spaces.action_high, strict=True)
        ends = [each if all(map(math.isfinite, each)) else (-1.0, 1.0) for each in bounds]
        return ActionRange(*zip(*ends, strict=True))
    file = Path(model_folder(model.path or "", "actor.model.path")) / "config.json"
    try:
        stats = json.loads(file.read_text(encoding="utf-8")).get("norm_stats") or {}
        if model.unnorm_key not in stats:
            allowed = ", ".join(sorted(stats)) or "none: config.json has no norm_stats"
            hint = f"remove {_KEY}: actions are scaled to the environment's bounds" if not stats else ""
            message = f"{file} has no statistics of this data set"
            raise ConfigError([Problem(_KEY, message, value=model.unnorm_key, allowed=allowed, hint=hint)])
        action = stats[model.unnorm_key]["action"]
        low, high = (
            action[quantile] if quantile in action else action[bound]
            for quantile, bound in (("q01", "min"), ("q99", "max"))
        )
        scaled = action.get("mask", [True] * len(low))
        ends = [(float(a), float(b)) if one else (-1.0, 1.0) for a, b, one in zip(low, high, scaled, strict=True)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            [Problem(_KEY, f"{file} has no usable norm_stats: {error!r}", value=model.unnorm_key)]
        ) from error
    if len(ends) != spaces.action.size:
        message = f"these statistics have {len(ends)} numbers per action, the environment has {spaces.action.size}"
        raise ConfigError([Problem(_KEY, message, value=model.unnorm_key)])
    return ActionRange(*zip(*ends, strict=True))


def space_problems(model: Model, spaces: EnvSpaces) -> list[Problem]:
    """Returns a problem for each property of these spaces that a policy on a vision-language model does not allow."""
    kind, shape, problems = "actor.model.type", spaces.observation_shape, []
    if model.type == "vlm_tokens" and not spaces.images:
        message, allowed = "vlm_tokens needs images, and the environment observes none", "uint8 images"
        hint = "env.pixels has a MuJoCo environment drawn; actor.model.type: pi0 reads numbers too"
        problems.append(Problem(kind, message, value=f"shape {shape}", allowed=allowed, hint=hint))
    elif not (spaces.images or model.train_vision):
        message = "has no effect here: the environment observes no images, so the policy has no vision tower"
        hint = "remove it; an inherited one: actor.model.train_vision: true"
        problems.append(Problem("actor.model.train_vision", message, value="false", hint=hint))
    if spaces.action.kind != "continuous":
        message = f"{model.type} chooses numbers, and the environment takes choices"
        problems.append(Problem(kind, message, value=model.type, hint=f"{kind}: vla, or mlp without images"))
        return problems
    bounded = all(map(math.isfinite, (*spaces.action_low, *spaces.action_high)))
    if not bounded and model.unnorm_key is None and model.type != "smolvla":
        message = "actions are placed between their bounds, and some of the environment's have none"
        hint = "wrap it so that they are bounded (gymnasium.wrappers.RescaleAction)"
        hint += f", or {_KEY}: statistics of a data set" if model.path else ""
        problems.append(Problem(kind, message, value=model.type, hint=hint))
    return problems
