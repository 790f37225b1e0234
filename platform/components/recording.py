"""Recordings: actions and the results of environments, step by step, and the rollout batch made of them.

This module records policies that choose one action per step. `policy_recordings/` records hidden states and chunks of
actions. `environment.py` steps the environments and normalises observations.
"""

from __future__ import annotations

import numpy as np
import torch

from rl_platform.components.policy_rollout import Actions
from rl_platform.config.schema.algorithm import Bootstrap
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.vector import EpisodeStats, StepResult
from rl_platform.records import RolloutBatch

Where = tuple[slice, int]  # environments, and the position in steps


def bootstrapped(ends: np.ndarray, terminated: np.ndarray, kind: Bootstrap) -> np.ndarray:
    """Returns [num_envs, T] bool: the ends after which the value of the next state counts.

    standard: ends of episodes that did not terminate; always: all ends; none: no end. A rollout that stops in the
    middle of an episode always counts it, as the task gives no reason for that end.
    """
    counted: np.ndarray = {"standard": ends & ~terminated, "always": ends.copy(), "none": np.zeros_like(ends)}[kind]
    counted[:, -1] |= ~ends[:, -1]
    return counted


class Recording:
    """Arrays [num_envs, steps, ...] of a policy that chooses one action per step.

    turn: an environment whose episode ends is `idle` until the next multiple of this number of steps. 1: it begins the
    next episode at once.
    """

    def __init__(self, num_envs: int, steps: int, spaces: EnvSpaces, turn: int = 1) -> None:
        self.turn, self.idle = turn, np.zeros(num_envs, bool)
        shape, width = (num_envs, steps), spaces.observation_size
        self.observations = np.zeros((*shape, width), spaces.observation_dtype)
        self.end_observations = np.zeros((*shape, width), spaces.observation_dtype)
        self.actions: np.ndarray | None = None  # of the kind that the policy chooses
        self.log_probs: np.ndarray = np.zeros(shape, np.float32)
        self.rewards: np.ndarray = np.zeros(shape, np.float32)
        self.ends, self.terminated = np.zeros(shape, bool), np.zeros(shape, bool)
        self.invalid: np.ndarray = np.zeros(shape, bool)
        self.skipped = np.full(shape, turn > 1)
        self.episodes: list[EpisodeStats] = []

    @property
    def env_steps(self) -> int:
        return int(self.skipped.size - self.skipped.sum())

    def next_actions(self, actions: np.ndarray, where: Where) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the actions of one step at `where`, and the environments that skip it (None: no environment does)."""
        return actions, self._idle(where)

    def _idle(self, where: Where) -> np.ndarray | None:
        rows, position = where
        if position % self.turn == 0:
            self.idle[rows] = False
        return self.idle[rows] if self.turn > 1 else None

    def stepped(self, rows: slice) -> np.ndarray | None:
        """Returns the environments among `rows` that took the current step; None: all did."""
        return np.flatnonzero(~self.idle[rows]) if self.turn > 1 and self.idle[rows].any() else None

    def add(self, where: Where, observations: np.ndarray, actions: Actions, result: StepResult) -> None:
        """Adds one step: observations, actions, and results with normalised rewards and final observations."""
        self.observations[where] = observations
        self._actions_like(actions)[where], self.log_probs[where] = actions.array, actions.log_probs
        self.rewards[where] = result.rewards
        self.ends[where], self.invalid[where], self.terminated[where] = result.ended, result.invalid, result.terminated
        if len(result.final_observations):
            self.end_observations[where][result.ended] = result.final_observations
        self.episodes += result.episodes
        if self.turn > 1:
            self.skipped[where] = self.idle[where[0]]
            self.idle[where[0]] |= result.ended

    def _actions_like(self, actions: Actions) -> np.ndarray:
        """Returns the array of actions [num_envs, choices, ...]."""
        if self.actions is None:
            self.actions = np.zeros((*self.ends.shape, *actions.array.shape[1:]), actions.array.dtype)
        return self.actions

    def finish(self, next_observations: np.ndarray, kind: Bootstrap) -> RolloutBatch:
        """Returns the batch. A row that stops in the middle of an episode continues with `next_observations`."""
        followed = self._close(next_observations, kind)
        return self._batch(
            action_mask=torch.from_numpy(~self.invalid & ~self.skipped),
            rewards=torch.from_numpy(self.rewards),
            rollout_log_probs=torch.from_numpy(self.log_probs),
            ends=torch.from_numpy(self.ends),
            bootstrapped=torch.from_numpy(followed),
        )

    def _batch(self, **fields: torch.Tensor | None) -> RolloutBatch:
        """Returns the batch of these fields, one row per environment."""
        assert self.actions is not None
        num_envs = len(self.ends)
        return RolloutBatch(
            inputs={"observations": torch.from_numpy(self.observations), "actions": torch.from_numpy(self.actions)},
            sample_mask=torch.ones(num_envs, dtype=torch.bool),
            group_ids=torch.arange(num_envs),
            end_observations=torch.from_numpy(self.end_observations),
            **fields,  # type: ignore[arg-type]
        )

    def _close(self, next_observations: np.ndarray, kind: Bootstrap) -> np.ndarray:
        """Ends every row; returns `bootstrapped`."""
        cut = ~self.ends[:, -1]
        self.end_observations[cut, -1] = next_observations[cut]
        followed = bootstrapped(self.ends, self.terminated, kind)
        self.ends[:, -1] = True
        return followed


class HiddenStates:
    """Memory of a recurrent policy: `array` [num_envs,H] float32, the state after the last step of each running
    episode; 0 where an episode begins. It is stored beside the environments, so that rollout ranks have no state."""

    def __init__(self, num_envs: int, size: int) -> None:
        self.array: np.ndarray = np.zeros((num_envs, size), np.float32)

    def advance(self, rows: slice, actions: Actions, ended: np.ndarray) -> None:
        """Stores the states that came with `actions` of the environments `rows`; 0 where the episode `ended`."""
        assert actions.hidden_states is not None
        self.array[rows] = actions.hidden_states
        self.array[rows][ended] = 0.0
