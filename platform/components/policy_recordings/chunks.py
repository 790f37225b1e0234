"""Recordings of policies that choose several actions at once."""

from __future__ import annotations

import numpy as np
import torch

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.algorithms.variants.chunk_levels import ChunkLevels
from rl_platform.components.policy_rollout import Actions
from rl_platform.components.recording import Recording, Where
from rl_platform.config.schema.algorithm import Bootstrap
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.vector import StepResult
from rl_platform.records import RolloutBatch


class ChunkRecording(Recording):
    """Arrays [num_envs, C choices, ...] of a policy that chooses chunks of K actions.

    An episode that ends inside a chunk ends the chunk: the remaining actions are not executed, and the environment is
    `idle` at least until the next choice. A choice therefore has at most one end.
    """

    def __init__(self, num_envs: int, steps: int, spaces: EnvSpaces, levels: ActionLevels, turn: int = 1) -> None:
        super().__init__(num_envs, steps // levels.num_actions, spaces, max(turn, levels.num_actions))
        self.levels = ChunkLevels(**vars(levels))
        chunks = (*self.ends.shape, levels.num_actions)
        self.log_probs = np.zeros((*chunks, levels.num_components), np.float32)
        self.rewards = np.zeros(chunks, np.float32)
        self.executed, self.invalid = (np.zeros(chunks, bool) for _ in range(2))

    @property
    def env_steps(self) -> int:
        return int(self.executed.sum() + self.invalid.sum())

    def next_actions(self, actions: np.ndarray, where: Where) -> tuple[np.ndarray, np.ndarray | None]:
        return actions[:, where[1] % self.levels.num_actions], self._idle(where)

    def add(self, where: Where, observations: np.ndarray, actions: Actions, result: StepResult) -> None:
        rows, (choice, slot) = where[0], divmod(where[1], self.levels.num_actions)
        if slot == 0:
            self.observations[rows, choice] = observations
            self._actions_like(actions)[rows, choice] = actions.array
            self.log_probs[rows, choice] = actions.log_probs
        self.rewards[rows, choice, slot] = result.rewards
        self.executed[rows, choice, slot] = ~self.idle[rows] & ~result.invalid
        self.invalid[rows, choice, slot] = result.invalid
        self.ends[rows, choice] |= result.ended
        self.terminated[rows, choice] |= result.terminated
        if len(result.final_observations):
            self.end_observations[rows, choice][result.ended] = result.final_observations
        self.idle[rows] |= result.ended
        self.episodes += result.episodes

    def finish(self, next_observations: np.ndarray, kind: Bootstrap) -> RolloutBatch:
        followed = self._close(next_observations, kind)
        levels, executed = self.levels, torch.from_numpy(self.executed)
        log_probs = levels.of_components(torch.from_numpy(self.log_probs).flatten(0, 1), executed.flatten(0, 1))
        value_mask, entropy_units = levels.value_mask(executed), levels.entropy_units(executed)
        batch = self._batch(
            action_mask=levels.mask(executed).flatten(1),
            rewards=levels.placed_rewards(torch.from_numpy(self.rewards)).flatten(1),
            rollout_log_probs=log_probs.view(len(self.ends), -1),
            ends=self._at_last_position(self.ends),
            bootstrapped=self._at_last_position(followed),
            value_mask=None if value_mask is None else value_mask.flatten(1),
            entropy_units=None if entropy_units is None else entropy_units.flatten(1),
        )
        batch.inputs["executed"] = executed
        return batch

    def _at_last_position(self, of_choices: np.ndarray) -> torch.Tensor:
        """Maps [num_envs, C] bool to [num_envs, C P], after actions that were not executed, which estimators skip."""
        placed = torch.zeros(*of_choices.shape, self.levels.num_positions, dtype=torch.bool)
        placed[..., -1] = torch.from_numpy(of_choices)
        return placed.flatten(1)
