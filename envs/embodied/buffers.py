"""The arrays that environments share with the process that steps them, in one block of memory."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import numpy as np

from rl_platform.envs.embodied.spaces import EnvSpaces


class Buffers:
    """Arrays of N environments with D observation numbers, in one block of memory.

    observations, final_observations [N,D] float32, or uint8 of images; actions [N,A] float32, [N] int64 or, of several
    choices, [N,D] int64; rewards, returns [N] float64; lengths [N] int64; terminated, truncated, invalid [N] bool;
    success_once, success_at_end [N] int8: of episodes that ended, see `success.py`; idle [N] bool: environments to
    skip; busy [N] int64: for each worker the environment that it is stepping; failures [N] int64: replacements of each
    environment; warned, not_closed [N] bool: environments of which an invalid step, or an error of close(), was logged.
    """

    def __init__(self, num_envs: int, spaces: EnvSpaces, memory: mmap.mmap | None = None) -> None:
        fields = self._fields(num_envs, spaces)
        block: mmap.mmap | bytearray = memory if memory is not None else bytearray(self.size(num_envs, spaces))
        offset = 0
        for name, (shape, dtype) in fields.items():
            array: np.ndarray = np.ndarray(shape, dtype, buffer=block, offset=offset)
            setattr(self, name, array)
            offset += _aligned(array.nbytes)

    if TYPE_CHECKING:
        observations: np.ndarray
        final_observations: np.ndarray
        actions: np.ndarray
        rewards: np.ndarray
        returns: np.ndarray
        lengths: np.ndarray
        terminated: np.ndarray
        truncated: np.ndarray
        invalid: np.ndarray
        success_once: np.ndarray
        success_at_end: np.ndarray
        idle: np.ndarray
        busy: np.ndarray
        failures: np.ndarray
        warned: np.ndarray
        not_closed: np.ndarray

    @classmethod
    def size(cls, num_envs: int, spaces: EnvSpaces) -> int:
        """Returns the number of bytes needed."""
        fields = cls._fields(num_envs, spaces).values()
        return sum(_aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in fields)

    @staticmethod
    def _fields(num_envs: int, spaces: EnvSpaces) -> dict[str, tuple[tuple[int, ...], type]]:
        rows, dtype = (num_envs, spaces.observation_size), np.dtype(spaces.observation_dtype).type
        numbers: dict[str, type] = {"rewards": np.float64, "returns": np.float64, "lengths": np.int64}
        numbers |= dict.fromkeys(("terminated", "truncated", "invalid", "idle", "warned", "not_closed"), np.bool_)
        numbers |= {"success_once": np.int8, "success_at_end": np.int8, "busy": np.int64, "failures": np.int64}
        return {
            "observations": (rows, dtype),
            "final_observations": (rows, dtype),
            "actions": ((num_envs, *spaces.policy_action_shape), spaces.policy_action_dtype),
            **{name: ((num_envs,), kind) for name, kind in numbers.items()},
        }


def all_finite(numbers: np.ndarray) -> bool:
    """Returns whether all numbers are finite. If the sum of squares is finite, they are; it is computed faster."""
    return math.isfinite(np.vdot(numbers, numbers)) or bool(np.isfinite(numbers).all())


def _aligned(size: int) -> int:
    """Returns the size rounded up to cache lines, so that no two arrays share one."""
    return -(-size // 64) * 64
