"""Running normalisation of observations and rewards of all environments, with statistics in float64.

Only `update` and `count` change the statistics; evaluation and last observations of episodes are normalised with the
current ones. States are plain numbers and lists.

Normalisers of environments on a device compute with torch (`use_torch`). Within `on(device)` they take and return its
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rl_platform import acceleration
from rl_platform.envs.embodied.arrays import Array, computed_by_torch, doubles, module_of
from rl_platform.records import StateDict

if TYPE_CHECKING:
    import torch

_EPSILON = 1e-8
_NOTHING = np.empty((0, 0), np.float32)


class RunningMoments:
    """Mean and biased variance of all numbers so far, per element of `shape`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean: Array = np.zeros(shape)
        self.variance: Array = np.ones(shape)
        loops = acceleration.find("normalizing_loops")
        self._update = update_moments if loops is None else loops.update_moments()

    def use_torch(self) -> None:
        self._update = computed_by_torch(update_moments)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Holds mean and variance as tensors of `device` within the block."""
        self.mean, self.variance = _moved((self.mean, self.variance), device)
        try:
            yield
        finally:
            self.mean, self.variance = _returned((self.mean, self.variance))

    def update(self, batch: Array) -> None:
        """Merges the moments of batch [N,*shape] (Chan, Golub, LeVeque, 1979)."""
        self.update_and_normalize(batch, math.inf, _NOTHING)

    def update_and_normalize(self, batch: Array, clip: float, normalized: Array) -> None:
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
        loops = acceleration.find("normalizing_loops")
        self._normalize = normalize_rows if loops is None else loops.normalize_rows()

    def use_torch(self) -> None:
        """Computes with torch from now on."""
        self._moments.use_torch()
        self._normalize = computed_by_torch(normalize_rows)

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Takes and returns tensors of `device` within the block; after `use_torch`."""
        return self._moments.on(device)

    def update(self, observations: Array) -> None:
        """Adds observations [N,D] to the statistics."""
        if self.frozen:
            return
        self._moments.update(observations)
        if self._kept is not None:
            self._moments.mean[self._kept], self._moments.variance[self._kept] = 0.0, 1.0

    def count(self, observations: Array) -> Array:
        """Adds observations [N,D] to the statistics and returns them normalised, float32."""
        if self.frozen or self._kept is not None:
            self.update(observations)
            return self(observations)
        normalized = _empty_like(observations)
        self._moments.update_and_normalize(observations, self.clip, normalized)
        return normalized

    def __call__(self, observations: Array) -> Array:
        """Returns observations [N,D] normalised, float32."""
        normalized = _empty_like(observations)
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
        self._returns: Array = np.zeros(num_envs)
        self._gamma = gamma
        self._clip = clip
        loops = acceleration.find("normalizing_loops")
        self._normalize = normalize_rewards if loops is None else loops.normalize_rewards()

    def use_torch(self) -> None:
        """Computes with torch from now on."""
        self._normalize = computed_by_torch(normalize_rewards)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Takes and returns tensors of `device` within the block; after `use_torch`."""
        with self._moments.on(device):
            (self._returns,) = _moved((self._returns,), device)
            try:
                yield
            finally:
                (self._returns,) = _returned((self._returns,))

    def __call__(self, rewards: Array, ended: Array, rows: slice | np.ndarray = slice(None)) -> Array:
        """Adds one step of N environments to the statistics: rewards [N], ended [N] bool -> normalised [N] float32.

        `rows`: the indices of these environments among all.
        """
        moments, returns, normalized = self._moments, self._returns[rows], _empty_like(rewards)
        statistics = moments.mean, moments.variance, moments.count
        self._normalize(rewards, ended, self._gamma, self._clip, returns, *statistics, normalized)
        moments.count += len(rewards)
        if not isinstance(rows, slice):  # a slice is a view and was updated in place
            self._returns[rows] = returns
        return normalized

    def begin(self, which: np.ndarray) -> None:
        """Forgets the running episodes of environments `which` (indices), which begin new ones."""
        self._returns[which] = 0.0

    def state_dict(self) -> dict[str, object]:
        return {"moments": self._moments.state_dict(), "returns": self._returns.tolist()}

    def load_state_dict(self, state: StateDict) -> None:
        self._moments.load_state_dict(state["moments"])
        self._returns = np.asarray(state["returns"], np.float64)


def update_moments(batch: Array, mean: Array, variance: Array, count: int, clip: float, normalized: Array) -> None:
    """Merges the moments of batch [N,D] into mean and variance [D] of `count` rows, in place.

    Then writes the first K rows, normalised, into `normalized` [K,D].
    """
    rows, batch = len(batch), doubles(batch)
    own_mean = batch.mean(axis=0)
    squares = ((batch - own_mean) ** 2).sum(axis=0)
    _merge(mean, variance, count, rows, own_mean, squares)
    if len(normalized):
        normalize_rows(batch[: len(normalized)], mean, variance, clip, normalized)


def normalize_rows(rows: Array, mean: Array, variance: Array, clip: float, normalized: Array) -> None:
    """Writes (rows - mean) / sqrt(variance), clipped to +-clip, into `normalized` [N,D] float32; mean, variance [D]."""
    normalized[:] = ((rows - mean) * _scale(variance)).clip(-clip, clip)


def normalize_rewards(
    rewards: Array,
    ended: Array,
    gamma: float,
    clip: float,
    returns: Array,
    mean: Array,
    variance: Array,
    count: int,
    normalized: Array,
) -> None:
    """Updates statistics of discounted returns [N] and writes rewards / sqrt(variance), clipped, to `normalized` [N].

    `returns`, `mean` [] and `variance` [] of `count` returns are updated in place.
    """
    # R_t = gamma R_{t-1} + r_t, from 0 in every episode
    returns[:] = returns * gamma + rewards
    own_mean = returns.mean()
    _merge(mean, variance, count, len(returns), own_mean, ((returns - own_mean) ** 2).sum())
    normalized[:] = (rewards * _scale(variance)).clip(-clip, clip)
    returns[ended] = 0.0


def _merge(mean: Array, variance: Array, count: int, rows: int, own_mean: Array, squares: Array) -> None:
    """Merges `rows` numbers with their mean and sum of squared distances into mean and variance of `count` others."""
    total, delta = count + rows, own_mean - mean
    # M2 = M2_a + M2_b + delta^2 n_a n_b / n;  variance = M2 / n
    variance[...] = (variance * count + squares + delta * delta * (count * (rows / total))) / total
    mean += delta * (rows / total)


def _scale(variance: Array) -> Array:
    return 1.0 / module_of(variance).sqrt(variance + _EPSILON)


def _empty_like(array: Array) -> Array:
    """Returns uninitialised float32 numbers in the shape of `array`."""
    module = module_of(array)
    return module.empty_like(array, dtype=module.float32)


def _moved(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    import torch

    return [torch.from_numpy(array).to(device) for array in arrays]


def _returned(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    return [tensor.cpu().numpy() for tensor in tensors]
