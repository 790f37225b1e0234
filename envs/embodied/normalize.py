"""Running normalisation of observations and rewards, in float64, vectorised over environments.

Normalising observations never changes the statistics, only `update` does: evaluation and the last observations of
episodes are normalised with the statistics as they stand. States are plain numbers and lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_EPSILON = 1e-8


class RunningMoments:
    """Mean and (biased) variance of everything seen so far, per element of `shape`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.variance = np.ones(shape)

    def update(self, batch: np.ndarray) -> None:
        """batch [N,*shape]. Merges its moments with those so far (Chan, Golub, LeVeque 1979)."""
        batch = batch.astype(np.float64)
        count = batch.shape[0]
        total = self.count + count
        delta = batch.mean(axis=0) - self.mean
        # M2 = M2_a + M2_b + delta^2 n_a n_b / n;  variance = M2 / n
        between = delta**2 * (self.count * count / total)
        self.variance = (self.variance * self.count + batch.var(axis=0) * count + between) / total
        self.mean = self.mean + delta * (count / total)
        self.count = total

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.tolist(), "variance": self.variance.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.mean = np.asarray(state["mean"], np.float64)
        self.variance = np.asarray(state["variance"], np.float64)


class ObservationNormalizer:
    """(observation - mean) / deviation, clipped to [-clip, clip]. Before the first `update` only clips."""

    def __init__(self, observation_shape: tuple[int, ...], clip: float) -> None:
        self._moments = RunningMoments(observation_shape)
        self._clip = clip
        self._set_scale()

    def update(self, observations: np.ndarray) -> None:
        """Count observations [N,D] in."""
        self._moments.update(observations)
        self._set_scale()

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """observations [...,D] -> float32 of the same shape."""
        scaled = (observations - self._moments.mean) * self._scale
        return np.clip(scaled, -self._clip, self._clip).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return self._moments.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments.load_state_dict(state)
        self._set_scale()

    def _set_scale(self) -> None:
        self._scale = 1.0 / np.sqrt(self._moments.variance + _EPSILON)


class RewardNormalizer:
    """reward / deviation of the running discounted return, clipped to [-clip, clip].

    The mean is left alone: shifting rewards would change which behaviour is best.
    """

    def __init__(self, num_envs: int, gamma: float, clip: float) -> None:
        self._moments = RunningMoments(())
        self._returns = np.zeros(num_envs)
        self._gamma = gamma
        self._clip = clip

    def __call__(self, rewards: np.ndarray, ended: np.ndarray, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Count one step of N environments in and normalise it: rewards [N], ended [N] bool -> [N] float32.

        `rows`: which of all environments these are.
        """
        # R_t = gamma R_{t-1} + r_t, from 0 in every episode
        returns = self._returns[rows] * self._gamma + rewards
        self._moments.update(returns)
        self._returns[rows] = np.where(ended, 0.0, returns)
        scaled = rewards / np.sqrt(self._moments.variance + _EPSILON)
        return np.clip(scaled, -self._clip, self._clip).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self._moments.state_dict(), "returns": self._returns.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments.load_state_dict(state["moments"])
        self._returns = np.asarray(state["returns"], np.float64)
