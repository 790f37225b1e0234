"""The shape of an embodied policy and its numbers of parameters and products, without weights and torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rl_platform.config.schema.models import Lora
from rl_platform.placement.estimates.model_shape import ModelShape

SMALL = 2**17  # parameters: a GPU would wait for the launches of its kernels. An estimate; see docs/gpu.md
OBSERVATIONS, ACTIONS = 64, 16  # assumed: the plan does not start the environment


@dataclass(frozen=True)
class ConvShape:
    """A layer of convolutions over an image."""

    parameters: int
    channels: int
    places: int

    @property
    def elements(self) -> int:
        """Number of its outputs for one image."""
        return self.channels * self.places


@dataclass(frozen=True)
class PolicyShape:
    """An embodied policy: one backbone, a policy head and a value head. Numbers of observations and actions are
    assumed, and the size of images that the environment itself gives.

    widths: of the MLP, whose first layer reads `inputs` numbers. `language` reads `tokens` of them per row instead.
    """

    widths: tuple[int, ...]
    inputs: int = OBSERVATIONS
    convolutions: tuple[ConvShape, ...] = ()
    language: ModelShape | None = None
    tokens: int = 0
    frozen: bool = False

    @property
    def parameters(self) -> int:
        vision = sum(layer.parameters for layer in self.convolutions)
        if self.language is not None:
            return vision + self.language.parameters
        sizes = (self.inputs, *self.widths)
        layers = sum((first + 1) * second for first, second in itertools.pairwise(sizes))
        return vision + layers + (sizes[-1] + 1) * (ACTIONS + 1) + ACTIONS

    def trained_parameters(self, lora: Lora | None = None) -> int:
        """All, or those outside the language model and its adapters."""
        if self.language is None or not (self.frozen or lora):
            return self.parameters
        adapters = 0 if lora is None else self.language.adapter_parameters(lora)
        return self.parameters - self.language.parameters + adapters

    @property
    def active_parameters(self) -> int:
        return self.parameters

    @property
    def layers(self) -> int:
        return len(self.widths) + len(self.convolutions) + (self.language.layers if self.language else 0)

    @property
    def elements(self) -> list[int]:
        """Number of outputs of each layer for one row, without a language model."""
        return [*(layer.elements for layer in self.convolutions), *self.widths]

    @property
    def products_per_token(self) -> int:
        """Multiply-adds of one row's forward."""
        vision = sum(layer.parameters * (layer.places - 1) for layer in self.convolutions)
        if self.language is None:
            return self.parameters + vision
        return self.parameters - self.language.parameters + vision + self.tokens * self.language.products_per_token
