"""The interface of weight transfers to other processes, and functions that all of them use.

A rank of a learner publishes weights. Components in its process get references. Other processes get the weights by one
of two transfers behind this interface: a process group (`group.py`) or Ray's object store
(`runtime/ray/weight_store.py`). `runtime/ray/publications.py` selects it. Both compare checksums, except groups with
SGLang's processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from rl_platform.runtime.weights_token import WeightsToken

ROW = 4096  # bytes that are summed up together

Ask = Callable[[object], Any]  # sends a request to the process of the sender; returns the answer of its transfer
Received = TypeVar("Received", covariant=True)


class WeightTransfer(Protocol[Received]):
    """Transfers published weights from the process of their rank to another process.

    `publish` runs at the sender, between two calls of the rank. `receive` runs at the receiver.
    """

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: Any) -> object:
        """Makes the state available to the receiver that sent `request`; returns the answer to it."""

    def receive(self, token: WeightsToken, ask: Ask) -> Received | None:
        """Returns the weights; None if this transfer does not reach the sender.

        ask: sends a request and returns the result of `publish`. Raises WorkerError for a failed or damaged transfer.
        """


@dataclass(frozen=True)
class TensorShape:
    """A tensor of the state; `same_as`: the name of an earlier one that it shares its memory with."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    same_as: str | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shapes_of(state: Mapping[str, Tensor]) -> tuple[TensorShape, ...]:
    """Returns name, type and shape of each tensor. Tensors of the same memory refer to the first of them."""
    first: dict[Hashable, str] = {}
    shapes = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        place = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), tensor.device) if tensor.numel() else name
        same_as = first.setdefault(place, name)
        shapes.append(TensorShape(name, tensor.dtype, shape, None if same_as == name else same_as))
    return tuple(shapes)


def shapes_under(names: Sequence[str], tensor: Tensor) -> list[TensorShape]:
    """Returns name, type and shape of one tensor with these names, of which the first is its own."""
    first, shape = names[0], tuple(tensor.shape)
    return [TensorShape(name, tensor.dtype, shape, None if name == first else first) for name in names]


def empty(tensors: Sequence[TensorShape], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Returns a state of uninitialised tensors; tensors with `same_as` share memory."""
    state: dict[str, Tensor] = {}
    for tensor in tensors:
        known = state.get(str(tensor.same_as))
        state[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if known is None else known
    return state


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Returns [N] uint8, a view if the tensor is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> bytes:
    """Returns the checksum of a contiguous tensor's bytes.

    On a GPU it is the checksum of their sums over rows and columns, which the GPU computes: copying the tensor to main
    memory would take longer than sending it.
    """
    return checksum_of([bytes_of(tensor)] if tensor.device.type == "cpu" else _sums(tensor))


def _sums(tensor: Tensor) -> list[np.ndarray]:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // ROW * ROW
    table = flat[:whole].view(-1, ROW)
    return [bytes_of(part) for part in (table.sum(0), table.sum(1), flat[whole:])]


def checksum_of(parts: Sequence[np.ndarray]) -> bytes:
    """Returns 128 bits of XXH3. Two different contents have equal checksums with a probability of 1 in 10^38."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.digest()
