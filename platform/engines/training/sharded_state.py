"""The training state of a model as the parts that a rank holds, by name. `state_files` writes and reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Offsets = tuple[int, ...]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ShardedTensor:
    """This rank's parts of a tensor of `shape`, as (offsets, view); loading a checkpoint writes into the views.

    `copies` are loaded but not saved, because other parts, on this or another rank, have the same elements.
    """

    shape: tuple[int, ...]
    parts: list[tuple[Offsets, Tensor]] = field(default_factory=list)
    copies: list[tuple[Offsets, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, tensor: Tensor) -> ShardedTensor:
        """Returns this rank's part of a DTensor, or all of a plain tensor, which is equal on every rank."""
        tensor = tensor.detach()
        if not hasattr(tensor, "to_local"):
            return cls(tensor.shape, [((0,) * tensor.dim(), tensor)])
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shared = cast("DTensor", tensor)
        _, offsets = compute_local_shape_and_global_offset(shared.shape, shared.device_mesh, shared.placements)
        return cls(tensor.shape, [(tuple(offsets), shared.to_local())])

    def add(self, offsets: Offsets, part: Tensor, written: bool) -> None:
        """Adds a view of this rank. written: saving writes it; otherwise it is one of the `copies`."""
        (self.parts if written else self.copies).append((offsets, part))

    @property
    def destinations(self) -> list[tuple[Offsets, Tensor]]:
        """The views that loading fills."""
        return self.parts + self.copies


ShardedState = dict[str, ShardedTensor]


def state_bytes(state: ShardedState) -> int:
    """Returns the bytes of this rank's parts."""
    return sum(part.nbytes for sharded in state.values() for _, part in sharded.parts)


def adam_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns step count and moments of a parameter. Before the first step it creates them as Adam would."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state.update({key: torch.zeros_like(parameter, requires_grad=False) for key in MOMENTS})
    return state
