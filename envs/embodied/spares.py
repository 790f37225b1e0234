"""Replaces environments that raise."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rl_platform.envs.embodied.descriptions import EnvSetup
    from rl_platform.envs.embodied.spaces import AnyEnv

logger = logging.getLogger(__name__)


class Spares:
    """Builds replacements for environments first, first + 1, ... and counts them in `failures` [N] of all workers.

    `seeds`: the seeds of these environments.
    """

    def __init__(self, setup: EnvSetup, failures: np.ndarray, first: int) -> None:
        self._setup, self._failures, self._first = setup, failures, first
        self._new: set[int] = set()
        self.seeds: list[int] = []

    def replacement(self, i: int, broken: AnyEnv, error: Exception) -> AnyEnv:
        """Returns a replacement for environment first + i, which raised `error`. Raises it if no restarts are left."""
        left = self._setup.restarts - int(self._failures.sum())
        if left <= 0:
            raise error
        name = f"environment {self._first + i} ({self._setup.description.id})"
        logger.warning("%s is replaced, %d restarts are left; it raised", name, left - 1, exc_info=error)
        self._failures[self._first + i] += 1
        with contextlib.suppress(Exception):  # it may be broken
            broken.close()
        self._new.add(i)
        return self._setup.make(self._first + i)

    def seed_of_new(self, i: int) -> int | None:
        """Returns the seed of a new replacement, once; None for an environment that keeps its random state."""
        if i not in self._new:
            return None
        self._new.remove(i)
        entropy = [self.seeds[i], int(self._failures[self._first + i])]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])
