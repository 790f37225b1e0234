"""What the environments answer to actions, recorded step by step and turned into a rollout batch."""

from __future__ import annotations

import numpy as np
import torch

from rl_platform.components.policy_rollout import Actions
from rl_platform.config.schema.algorithm import Bootstrap
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.vector import EpisodeStats, StepResult
from rl_platform.records import RolloutBatch


def bootstrapped(ends: np.ndarray, terminated: np.ndarray, kind: Bootstrap) -> np.ndarray:
    """[num_envs, T] bool: after which positions the value of the state that follows counts.

    standard: ends of episodes that did not terminate; always: all ends; none: no end. In the middle of an episode a
    rollout ends for no reason of the task, so it always counts there.
    """
    found: np.ndarray = {"standard": ends & ~terminated, "always": ends.copy(), "none": np.zeros_like(ends)}[kind]
    found[:, -1] |= ~ends[:, -1]
    return found


class Recording:
    """Arrays [num_envs, steps, ...] that fill up step by step."""

    def __init__(self, num_envs: int, steps: int, spaces: EnvSpaces) -> None:
        shape, width = (num_envs, steps), spaces.observation_size
        self.observations = np.zeros((*shape, width), spaces.observation_dtype)
        self.end_observations = np.zeros((*shape, width), spaces.observation_dtype)
        self.actions: np.ndarray | None = None  # of the kind that the policy chooses
        self.log_probs, self.rewards = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.ends, self.invalid, self.terminated = (np.zeros(shape, bool) for _ in range(3))
        self.episodes: list[EpisodeStats] = []

    @property
    def env_steps(self) -> int:
        return int(self.ends.size)

    def add(
        self,
        where: tuple[slice, int],
        observations: np.ndarray,
        actions: Actions,
        rewards: np.ndarray,
        result: StepResult,
        final_observations: np.ndarray,
    ) -> None:
        """One step at `where`: environments and position."""
        self.observations[where] = observations
        if self.actions is None:
            self.actions = np.zeros((*self.ends.shape, *actions.array.shape[1:]), actions.array.dtype)
        self.actions[where], self.log_probs[where] = actions.array, actions.log_probs
        self.rewards[where] = rewards
        self.ends[where], self.invalid[where], self.terminated[where] = result.ended, result.invalid, result.terminated
        if len(final_observations):
            self.end_observations[where][result.ended] = final_observations
        self.episodes += result.episodes

    def finish(self, next_observations: np.ndarray, kind: Bootstrap) -> RolloutBatch:
        """The batch; a row that ends in the middle of an episode continues with `next_observations`."""
        cut = ~self.ends[:, -1]
        self.end_observations[cut, -1] = next_observations[cut]
        followed = bootstrapped(self.ends, self.terminated, kind)
        self.ends[:, -1] = True
        assert self.actions is not None
        num_envs = len(self.ends)
        arrays = {"observations": self.observations, "actions": self.actions}
        return RolloutBatch(
            inputs={name: torch.from_numpy(array) for name, array in arrays.items()},
            action_mask=torch.from_numpy(~self.invalid),
            sample_mask=torch.ones(num_envs, dtype=torch.bool),
            group_ids=torch.arange(num_envs),
            rewards=torch.from_numpy(self.rewards),
            rollout_log_probs=torch.from_numpy(self.log_probs),
            ends=torch.from_numpy(self.ends),
            bootstrapped=torch.from_numpy(followed),
            end_observations=torch.from_numpy(self.end_observations),
        )
