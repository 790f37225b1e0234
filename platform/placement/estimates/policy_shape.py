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
class Stack:
    """Transformer layers of a policy and the parameters around them.

    shape: of the layers alone. tokens: of one row; 0: computed once for all rows. outer: matrices beside the layers
    that every token goes through; table: parameters that are looked up, added or multiplied by element. passes, acting:
    how often the tokens go through the layers for an update and for an action. context: keys and values of another
    stack that the tokens attend to as well. images: the tokens are those of as many images, each of which attends to
    itself alone.
    """

    shape: ModelShape
    tokens: int
    outer: int = 0
    table: int = 0
    passes: int = 1
    acting: int = 1
    context: int = 0
    images: int = 1
    frozen: bool = False

    @property
    def parameters(self) -> int:
        return self.shape.decoder_parameters + self.outer + self.table

    @property
    def products(self) -> int:
        """Multiply-adds of one pass of a row's tokens."""
        shape = self.shape
        scores = 2 * (self.tokens // self.images + self.context) * shape.layers * shape.attention_width
        return self.tokens * (shape.matrices + self.outer + scores)


@dataclass(frozen=True)
class PolicyShape:
    """An embodied policy: one backbone, a policy head and a value head. Numbers of observations and actions are
    assumed, and the size of images that the environment itself gives.

    widths: of the MLP, whose first layer reads `inputs` numbers. Transformers are in `stacks` instead, in the order of
    computation; adapters are added to the one at index `adapted`. heads: other trained parameters of such a policy;
    fixed: other parameters without a gradient. compiled: `platform/accel/` computes it in loops on a CPU.
    """

    widths: tuple[int, ...]
    inputs: int = OBSERVATIONS
    convolutions: tuple[ConvShape, ...] = ()
    stacks: tuple[Stack, ...] = ()
    adapted: int = 0
    heads: int = 0
    fixed: int = 0
    compiled: bool = False

    @property
    def parameters(self) -> int:
        vision = sum(layer.parameters for layer in self.convolutions)
        if self.stacks:
            return vision + sum(stack.parameters for stack in self.stacks) + self.heads + self.fixed
        sizes = (self.inputs, *self.widths)
        layers = sum((first + 1) * second for first, second in itertools.pairwise(sizes))
        return vision + layers + (sizes[-1] + 1) * (ACTIONS + 1) + ACTIONS

    def trained_parameters(self, lora: Lora | None = None) -> int:
        """Returns the number of trained parameters; adapters replace the weights of their stack."""
        frozen = self.fixed + sum(stack.parameters for stack in self.stacks if stack.frozen)
        if lora is None or not self.stacks:
            return self.parameters - frozen
        stack = self.stacks[self.adapted]
        replaced = 0 if stack.frozen else stack.parameters
        return self.parameters - frozen - replaced + stack.shape.adapter_parameters(lora)

    @property
    def trained_stacks(self) -> list[Stack]:
        """The stacks of an update's backward pass: those from the first trained parameters on."""
        for index, stack in enumerate(self.stacks):
            if self.convolutions or not stack.frozen:
                return list(self.stacks[index:])
        return []

    @property
    def active_parameters(self) -> int:
        return self.parameters

    @property
    def layers(self) -> int:
        return len(self.widths) + len(self.convolutions) + sum(stack.shape.layers for stack in self.stacks)

    @property
    def width(self) -> int:
        """Width of the largest matrices."""
        return max((*self.widths, *(stack.shape.hidden for stack in self.stacks)), default=1)

    @property
    def elements(self) -> list[int]:
        """Number of outputs of each layer for one row, without transformers."""
        return [*(layer.elements for layer in self.convolutions), *self.widths]

    @property
    def tokens(self) -> int:
        """Tokens of one row that go through matrices together; 1 without transformers."""
        return max((stack.tokens for stack in self.stacks), default=1)

    @property
    def products_per_token(self) -> int:
        """Multiply-adds of one row's forward in an update."""
        return self._products([stack.passes for stack in self.stacks])

    def update_forwards(self, trained: float) -> float:
        """Returns the multiply-adds of an update over those of a forward; a trained layer costs `trained` forwards."""
        forward_only = sum(stack.passes * stack.products for stack in self.stacks if stack not in self.trained_stacks)
        return trained - (trained - 1) * forward_only / self.products_per_token

    @property
    def acting_products(self) -> int:
        """Multiply-adds of one row's forward for an action."""
        return self._products([stack.acting for stack in self.stacks])

    def _products(self, passes: list[int]) -> int:
        vision = sum(layer.parameters * (layer.places - 1) for layer in self.convolutions)
        if not self.stacks:
            return self.parameters + vision
        vision += sum(layer.parameters for layer in self.convolutions)
        return vision + self.heads + sum(n * stack.products for n, stack in zip(passes, self.stacks, strict=True))
