"""Partial observation: an environment that hides numbers of another environment's observations.

    env: {id: "rl_platform.envs.embodied.masked:Masked-v0", kwargs: {env_id: CartPole-v1, hide: [1, 3]}}

Gymnasium steps it, also if it wraps a MuJoCo task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv


class Masked(gymnasium.ObservationWrapper[np.ndarray, object, np.ndarray]):
    """Removes the entries `hide` (indices) from flat observations.

    Raises ValueError for indices out of range and if no entry would be left.
    """

    def __init__(self, env: AnyEnv, hide: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ValueError(f"hide takes places in a flat vector, and observations are {space}")
        size = space.shape[0]
        unknown = sorted(set(hide) - set(range(size)))
        if unknown or len(set(hide)) == size:
            problem = f"no numbers {unknown}" if unknown else "nothing else"
            raise ValueError(f"hide: {list(hide)}, but observations have {problem}; they have {size} numbers")
        self.shown = np.setdiff1d(np.arange(size), np.asarray(hide, int))
        self.observation_space = Box(space.low[self.shown], space.high[self.shown], dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        shown: np.ndarray = observation[self.shown]
        return shown


def make(env_id: str, hide: Sequence[int], **kwargs: Any) -> Masked:
    """Builds `env_id` with `kwargs` and its own time limit, and hides entries `hide` of its observations."""
    return Masked(gymnasium.make(env_id, disable_env_checker=True, **kwargs), hide)


gymnasium.register("Masked-v0", entry_point=f"{__name__}:make")
