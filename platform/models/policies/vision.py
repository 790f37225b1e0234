"""Image layouts and the convolutional encoder of the CNN and vision-language-action policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_platform.config.schema.models import ConvNet
from rl_platform.envs.embodied.spaces import ObservationPart


@dataclass(frozen=True)
class ImageLayout:
    """The shape of an environment's images.

    [height,width,channels], a stack [S,height,width,channels], or a stack of gray images [S,height,width], recognised
    by S being the smallest of the three.
    """

    shape: tuple[int, ...]

    @property
    def stack_first(self) -> bool:
        return len(self.shape) == 3 and self.shape[0] < min(self.shape[1:])

    @property
    def height_and_width(self) -> tuple[int, int]:
        return self.shape[:2] if len(self.shape) == 3 and not self.stack_first else self.shape[1:3]

    @property
    def channels(self) -> int:
        return math.prod(self.shape) // math.prod(self.height_and_width)

    def channels_first(self, flat: Tensor) -> Tensor:
        """Returns flat images [B,D] as [B,channels,height,width]; a view where the layout allows it."""
        images = flat.view(-1, *self.shape)
        if self.stack_first:
            return images
        if len(self.shape) == 3:
            return images.permute(0, 3, 1, 2)
        return images.permute(0, 1, 4, 2, 3).flatten(1, 2)


class ImageEncoder(nn.Module):
    """Convolutions, each followed by ReLU, as in Mnih et al. (2015); orthogonal initialisation with gain sqrt(2).

    The last feature map has `positions` places of `channels` numbers, `width` = positions * channels in all.
    """

    def __init__(self, observation_shape: Sequence[int], cnn: ConvNet) -> None:
        super().__init__()
        self.layout = ImageLayout(tuple(observation_shape))
        layers: list[nn.Module] = []
        channels = self.layout.channels
        for out, kernel, stride in zip(cnn.channels, cnn.kernels, cnn.strides, strict=True):
            layer = nn.Conv2d(channels, out, kernel, stride)
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.ReLU()]
            channels = out
        self.layers = nn.Sequential(*layers)
        self.channels = channels
        self.positions = math.prod(cnn.map_sizes(*self.layout.height_and_width)[-1])
        self.width = self.channels * self.positions

    def forward(self, flat: Tensor) -> Tensor:
        """Images [B,D] in [0,1] -> features [B,width], position by position."""
        return self.places(flat).flatten(1)

    def places(self, flat: Tensor) -> Tensor:
        """Images [B,D] in [0,1] -> features [B,positions,channels]."""
        features: Tensor = self.layers(self.layout.channels_first(flat))
        return features.flatten(2).transpose(1, 2)


class PartsEncoder(nn.Module):
    """Images among other parts of an observation: each image passes convolutions of its own, the rest stays as it is.

    width: features of all images and the other numbers, in the order of the parts.
    """

    def __init__(self, parts: Sequence[ObservationPart], cnn: ConvNet) -> None:
        super().__init__()
        self.sizes = [part.size for part in parts]
        self.encoders = nn.ModuleList(ImageEncoder(p.shape, cnn) if p.image else nn.Identity() for p in parts)
        widths = (getattr(encoder, "width", size) for encoder, size in zip(self.encoders, self.sizes, strict=True))
        self.width = sum(widths)

    def forward(self, flat: Tensor) -> Tensor:
        """Observations [B,D], with pixels in [0,1] -> features [B,width]."""
        parts = flat.split(self.sizes, dim=1)
        return torch.cat([encoder(part) for encoder, part in zip(self.encoders, parts, strict=True)], dim=1)
