"""What the environments answer to chunks of actions, recorded step by step and turned into a rollout batch."""

from __future__ import annotations

import numpy as np
import torch

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.components.policy_rollout import Actions
from rl_platform.components.recording import bootstrapped
from rl_platform.config.schema.algorithm import Bootstrap
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.vector import EpisodeStats, StepResult
from rl_platform.records import RolloutBatch


class ChunkRecording:
    """Arrays [num_envs, C choices, ...] of K actions each.

    An episode that ends inside a chunk ends the chunk: what is left of it is not executed, the environment is `idle`
    until the next choice. So there is at most one end per choice.
    """

    def __init__(self, num_envs: int, steps: int, spaces: EnvSpaces, levels: ActionLevels) -> None:
        self.levels = levels
        choices, width = (num_envs, steps // levels.num_actions), spaces.observation_size
        actions = (*choices, levels.num_actions)
        continuous = spaces.action.kind == "continuous"
        self.observations = np.zeros((*choices, width), spaces.observation_dtype)
        self.end_observations = np.zeros((*choices, width), spaces.observation_dtype)
        self.actions = np.zeros((*actions, spaces.action.size), np.float32) if continuous else np.zeros(actions, int)
        self.log_probs = np.zeros((*actions, levels.num_components), np.float32)
        self.rewards = np.zeros(actions, np.float32)
        self.executed, self.invalid = (np.zeros(actions, bool) for _ in range(2))
        self.ends, self.terminated = (np.zeros(choices, bool) for _ in range(2))
        self.idle = np.zeros(num_envs, bool)
        self.episodes: list[EpisodeStats] = []

    @property
    def env_steps(self) -> int:
        return int(self.executed.sum() + self.invalid.sum())

    def begin(self, rows: slice) -> None:
        """These environments are about to execute the first action of new chunks."""
        self.idle[rows] = False

    def add(
        self,
        where: tuple[slice, int],
        observations: np.ndarray,
        actions: Actions,
        rewards: np.ndarray,
        result: StepResult,
        final_observations: np.ndarray,
    ) -> None:
        """One step at `where`: environments and position in the rollout, counted in steps."""
        rows, (choice, slot) = where[0], divmod(where[1], self.levels.num_actions)
        if slot == 0:
            self.observations[rows, choice] = observations
            self.actions[rows, choice], self.log_probs[rows, choice] = actions.array, actions.log_probs
        self.rewards[rows, choice, slot] = rewards
        self.executed[rows, choice, slot] = ~self.idle[rows] & ~result.invalid
        self.invalid[rows, choice, slot] = result.invalid
        self.ends[rows, choice] |= result.ended
        self.terminated[rows, choice] |= result.terminated
        if len(final_observations):
            self.end_observations[rows, choice][result.ended] = final_observations
        self.idle[rows] |= result.ended
        self.episodes += result.episodes

    def finish(self, next_observations: np.ndarray, kind: Bootstrap) -> RolloutBatch:
        """The batch; a row that ends in the middle of an episode continues with `next_observations`."""
        cut = ~self.ends[:, -1]
        self.end_observations[cut, -1] = next_observations[cut]
        followed = bootstrapped(self.ends, self.terminated, kind)
        self.ends[:, -1] = True
        num_envs, levels = len(self.ends), self.levels
        executed = torch.from_numpy(self.executed)
        log_probs = levels.of_components(torch.from_numpy(self.log_probs).flatten(0, 1), executed.flatten(0, 1))
        value_mask, entropy_units = levels.value_mask(executed), levels.entropy_units(executed)
        arrays = {"observations": self.observations, "actions": self.actions, "executed": self.executed}
        return RolloutBatch(
            inputs={name: torch.from_numpy(array) for name, array in arrays.items()},
            action_mask=levels.mask(executed).flatten(1),
            sample_mask=torch.ones(num_envs, dtype=torch.bool),
            group_ids=torch.arange(num_envs),
            rewards=levels.placed_rewards(torch.from_numpy(self.rewards)).flatten(1),
            rollout_log_probs=log_probs.view(num_envs, -1),
            ends=self._at_last_position(self.ends),
            bootstrapped=self._at_last_position(followed),
            end_observations=torch.from_numpy(self.end_observations),
            value_mask=None if value_mask is None else value_mask.flatten(1),
            entropy_units=None if entropy_units is None else entropy_units.flatten(1),
        )

    def _at_last_position(self, of_choices: np.ndarray) -> torch.Tensor:
        """[num_envs, C] bool -> [num_envs, C P]: behind actions that were not executed, which estimators skip."""
        placed = torch.zeros(*of_choices.shape, self.levels.positions, dtype=torch.bool)
        placed[..., -1] = torch.from_numpy(of_choices)
        return placed.flatten(1)
