"""The sections that describe images: how they are drawn, and what reads them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_platform.config.base import Section

Sizes = list[Annotated[int, Field(ge=1)]]


class ConvNet(Section):
    """`model.cnn`: convolutions over images, each followed by ReLU; as in Mnih et al. (2015) by default."""

    channels: Sizes = Field(default=[32, 64, 64], min_length=1, description="of each layer's output")
    kernels: Sizes = Field(default=[8, 4, 3], min_length=1, description="width and height of each layer's window")
    strides: Sizes = Field(default=[4, 2, 1], min_length=1, description="pixels from one window to the next")

    def map_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Height and width of what each layer gives, for an image of that size; 0 where its window does not fit."""
        found = []
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            height, width = (max(size - kernel + stride, 0) // stride for size in (height, width))
            found.append((height, width))
        return found


class Pixels(Section):
    """`env.pixels`: what MuJoCo draws instead of what the environment observes."""

    width: int = Field(default=64, ge=8, le=1024, description="of a picture, in pixels")
    height: int = Field(default=64, ge=8, le=1024, description="of a picture, in pixels")
    camera: str | None = Field(
        default=None, min_length=1, description="name of a camera of the model; null: the environment's usual view"
    )
    frame_stack: int = Field(default=3, ge=1, description="latest pictures in one observation, so that motion shows")
    grayscale: bool = Field(default=False, description="one channel per picture instead of three")
