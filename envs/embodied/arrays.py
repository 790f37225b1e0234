"""Operations on arrays of numpy and tensors of torch, for formulas that compute with both.

Operators, `+=`, slices, `clip`, and `all`, `sum` and `mean` with `axis` are the same in both and need none of these
functions. A formula of additions and products gives equal bits with both on a CPU; torch may round a square root of
many numbers differently in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
"""np.ndarray, or torch.Tensor."""


def module_of(array: Array) -> Any:
    """Returns the module whose functions take the array: numpy or torch."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def doubles(array: Array) -> Array:
    """Returns the numbers as float64; copies them if they have another type."""
    return array.astype(np.float64, copy=False) if isinstance(array, np.ndarray) else array.double()


def computed_by_torch(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls `function` with tensors in place of arrays.

    They share memory, so what `function` writes into a tensor is in the array.
    """
    import torch

    def computed(*arguments: Any) -> None:
        function(*(torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in arguments))

    return computed
