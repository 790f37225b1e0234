"""The type of the `ctx` argument of autograd functions, with the attributes that torch sets."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import FunctionCtx


class AutogradContext(FunctionCtx):
    """A subclass declares what its function keeps from the forward pass for the backward pass. Never constructed."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
