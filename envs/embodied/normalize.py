"""Running normalisation of observations and rewards of all environments, with statistics in float64.

Only `update` and `count` change the statistics; evaluation and last observations of episodes are normalised with the
current ones. States are plain numbers and lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rl_platform import acceleration
from rl_platform.records import StateDict

_EPSILON = 1e-8
_NOTHING = np.empty((0, 0), np.float32)


class RunningMoments:
    """Mean and biased variance of all numbers so far, per element of `shape`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.variance = np.ones(shape)
        loops = acceleration.normalizing_loops()
        self._update = update_moments if loops is None else loops.update_moments()

    def update(self, batch: np.ndarray) -> None:
        """Merges the moments of batch [N,*shape] (Chan, Golub, LeVeque, 1979)."""
        self.update_and_normalize(batch, math.inf, _NOTHING)

    def update_and_normalize(self, batch: np.ndarray, clip: float, normalized: np.ndarray) -> None:
        """Calls `update`, then normalises the first K rows of the batch into `normalized` [K,D] float32."""
        rows = batch.reshape(len(batch), -1)
        self._update(rows, self.mean.reshape(-1), self.variance.reshape(-1), self.count, clip, normalized)
        self.count += len(batch)

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "mean": self.mean.tolist(), "variance": self.variance.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        self.count = state["count"]
        self.mean = np.array(state["mean"], np.float64)
        self.variance = np.array(state["variance"], np.float64)


class ObservationNormalizer:
    """(observation - mean) / std, clipped to [-clip, clip]. Before the first `update` it only clips.

    frozen: `update` and `count` do not change the statistics any more.
    """

    frozen = False

    def __init__(self, observation_shape: tuple[int, ...], clip: float, normalized: Sequence[bool] = ()) -> None:
        """normalized [D]: False for numbers that stay as they are, as choices; empty: all are normalised."""
        self._moments = RunningMoments(observation_shape)
        self.clip = clip
        self._kept = ~np.asarray(normalized, bool) if len(normalized) else None
        loops = acceleration.normalizing_loops()
        self._normalize = normalize_rows if loops is None else loops.normalize_rows()

    def update(self, observations: np.ndarray) -> None:
        """Adds observations [N,D] to the statistics."""
        if self.frozen:
            return
        self._moments.update(observations)
        if self._kept is not None:
            self._moments.mean[self._kept], self._moments.variance[self._kept] = 0.0, 1.0

    def count(self, observations: np.ndarray) -> np.ndarray:
        """Adds observations [N,D] to the statistics and returns them normalised, float32."""
        if self.frozen or self._kept is not None:
            self.update(observations)
            return self(observations)
        normalized = np.empty(observations.shape, np.float32)
        self._moments.update_and_normalize(observations, self.clip, normalized)
        return normalized

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Returns observations [N,D] normalised, float32."""
        normalized = np.empty(observations.shape, np.float32)
        self._normalize(observations, self._moments.mean, self._moments.variance, self.clip, normalized)
        return normalized

    @property
    def mean_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """[D] float64 each: an observation is normalised to (observation - mean) * scale, before it is clipped."""
        return self._moments.mean, 1.0 / np.sqrt(self._moments.variance + _EPSILON)

    def state_dict(self) -> dict[str, object]:
        return self._moments.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._moments.load_state_dict(state)


class RewardNormalizer:
    """reward / std of the running discounted return, clipped to [-clip, clip].

    The mean is not subtracted, because shifting rewards would change the optimal policy.
    """

    def __init__(self, num_envs: int, gamma: float, clip: float) -> None:
        self._moments = RunningMoments(())
        self._returns = np.zeros(num_envs)
        self._gamma = gamma
        self._clip = clip
        loops = acceleration.normalizing_loops()
        self._normalize = normalize_rewards if loops is None else loops.normalize_rewards()

    def __call__(self, rewards: np.ndarray, ended: np.ndarray, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Adds one step of N environments to the statistics: rewards [N], ended [N] bool -> normalised [N] float32.

        `rows`: the indices of these environments among all.
        """
        moments, returns, normalized = self._moments, self._returns[rows], np.empty(len(rewards), np.float32)
        statistics = moments.mean, moments.variance, moments.count
        self._normalize(rewards, ended, self._gamma, self._clip, returns, *statistics, normalized)
        moments.count += len(rewards)
        if not isinstance(rows, slice):  # a slice is a view and was updated in place
            self._returns[rows] = returns
        return normalized

    def state_dict(self) -> dict[str, object]:
        return {"moments": self._moments.state_dict(), "returns": self._returns.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        self._moments.load_state_dict(state["moments"])
        self._returns = np.asarray(state["returns"], np.float64)


def update_moments(
    batch: np.ndarray, mean: np.ndarray, variance: np.ndarray, count: int, clip: float, normalized: np.ndarray
) -> None:
    """Merges the moments of batch [N,D] into mean and variance [D] of `count` rows, in place.

    Then writes the first K rows, normalised, into `normalized` [K,D].
    """
    rows, own_mean = len(batch), batch.mean(axis=0, dtype=np.float64)
    squares = np.square(batch - own_mean).sum(axis=0)
    _merge(mean, variance, count, rows, own_mean, squares)
    if len(normalized):
        normalize_rows(batch[: len(normalized)], mean, variance, clip, normalized)


def normalize_rows(
    rows: np.ndarray, mean: np.ndarray, variance: np.ndarray, clip: float, normalized: np.ndarray
) -> None:
    """Writes (rows - mean) / sqrt(variance), clipped to +-clip, into `normalized` [N,D] float32; mean, variance [D]."""
    normalized[:] = np.clip((rows - mean) * (1.0 / np.sqrt(variance + _EPSILON)), -clip, clip)


def normalize_rewards(
    rewards: np.ndarray,
    ended: np.ndarray,
    gamma: float,
    clip: float,
    returns: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    count: int,
    normalized: np.ndarray,
) -> None:
    """Updates statistics of discounted returns [N] and writes rewards / sqrt(variance), clipped, to `normalized` [N].

    `returns`, `mean` [] and `variance` [] of `count` returns are updated in place.
    """
    # R_t = gamma R_{t-1} + r_t, from 0 in every episode
    returns[:] = returns * gamma + rewards
    own_mean = returns.mean()
    _merge(mean, variance, count, len(returns), own_mean, np.square(returns - own_mean).sum())
    normalized[:] = np.clip(rewards * (1.0 / np.sqrt(variance + _EPSILON)), -clip, clip)
    returns[ended] = 0.0


def _merge(
    mean: np.ndarray, variance: np.ndarray, count: int, rows: int, own_mean: np.ndarray, squares: np.ndarray
) -> None:
    """Merges `rows` numbers with their mean and sum of squared distances into mean and variance of `count` others."""
    total, delta = count + rows, own_mean - mean
    # M2 = M2_a + M2_b + delta^2 n_a n_b / n;  variance = M2 / n
    variance[...] = (variance * count + squares + delta * delta * (count * (rows / total))) / total
    mean += delta * (rows / total)
