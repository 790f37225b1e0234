"""Copies tensors from main memory to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; no element is wider


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns tensors of main memory on `device`. A GPU receives all in one copy, for which the host does not wait.

    The copies on a GPU share one storage. On a CPU the tensors themselves are returned.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    ends = [0]
    for tensor in tensors:
        ends.append(-(-(ends[-1] + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
    places = [slice(start, start + tensor.nbytes) for start, tensor in zip(ends, tensors, strict=False)]
    # The driver copies from pinned memory while the host continues.
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(places, tensors, strict=True):
        staged[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    copied = staged.to(device, non_blocking=True)
    return [copied[place].view(tensor.dtype).view(tensor.shape) for place, tensor in zip(places, tensors, strict=True)]
