"""Operations on the rows of arrays of numpy or tensors of torch, for the formulas of tasks; see `arrays.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import add

import numpy as np

from rl_platform.envs.embodied.arrays import Array, module_of


def never(like: Array) -> Array:
    """Returns [N] bool, all False, for `like` [N]."""
    return like < -math.inf  # a third of the time of `zeros_like`


def squares(array: Array) -> Array:
    """Returns the sum of squares of each row, [N,...] -> [N]."""
    squared = array * array
    squared = squared if squared.ndim == 2 else squared.reshape(len(array), -1)
    if isinstance(array, np.ndarray):
        return np.add.reduce(squared, axis=1)
    return reduce(add, squared.unbind(1))  # in order, as numpy adds rows of fewer than eight numbers


def norms(array: Array) -> Array:
    """Returns the Euclidean norm of each row, [N,D] -> [N]."""
    return module_of(array).sqrt(squares(array))


def join(parts: Iterable[Array]) -> Array:
    """Flattens the rows of arrays [N,...] and concatenates them to [N,D]."""
    flat = [part if part.ndim == 2 else part.reshape(len(part), -1) for part in parts]
    return module_of(flat[0]).concatenate(flat, axis=1)
