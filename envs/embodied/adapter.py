"""What environments of other packages need to fit in: observations of several parts as one vector, seeds that count."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Dict, Tuple
from gymnasium.spaces.utils import flatten, flatten_space


class FlatObservations(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The parts of a Dict or Tuple one after another, in the order of the space: of a Dict that is made of a plain
    dictionary, as robot tasks with goals have it, alphabetically (achieved_goal, desired_goal, observation)."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = flatten_space(env.observation_space)

    def observation(self, observation: Any) -> np.ndarray:
        """-> [D]"""
        vector: np.ndarray = flatten(self.env.observation_space, observation)  # type: ignore[assignment]
        return vector


def flattened(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """`env`, with one vector where its observations have several parts of fixed sizes."""
    space = env.observation_space
    return FlatObservations(env) if isinstance(space, Dict | Tuple) and space.is_np_flattenable else env


def reset_env(env: gymnasium.Env[Any, Any], seed: int | None) -> Any:
    """The first observation of an episode that `seed` determines; None goes on with the environment's own randomness.

    An environment with the older method `seed` (Meta-World) does not listen to that of `reset`.
    """
    if seed is not None and callable(older := getattr(env.unwrapped, "seed", None)):
        older(seed)
    observation, _ = env.reset(seed=seed)
    return observation
