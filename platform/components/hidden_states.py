"""What a recurrent policy remembers of the running episodes, kept beside the environments that it remembers."""

from __future__ import annotations

import numpy as np
import torch

from rl_platform.components.policy_rollout import Actions
from rl_platform.components.recording import Recording
from rl_platform.config.schema.algorithm import Bootstrap
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.vector import StepResult
from rl_platform.records import RolloutBatch


class HiddenStates:
    """`array` [num_envs,H] float32: 0 where an episode begins, else what the policy answered with to the last step."""

    def __init__(self, num_envs: int, size: int) -> None:
        self.array = np.zeros((num_envs, size), np.float32)

    def advance(self, rows: slice, actions: Actions, ended: np.ndarray) -> None:
        """The environments `rows` took these actions; of those whose episode `ended` nothing is remembered."""
        assert actions.hidden_states is not None
        self.array[rows] = actions.hidden_states
        self.array[rows][ended] = 0.0


class RecurrentRecording(Recording):
    """A recording that also keeps the states before the first step of each sequence of `length` steps.

    `states` are those of the policy, which are to be advanced after each `add`.
    """

    def __init__(self, num_envs: int, steps: int, spaces: EnvSpaces, states: HiddenStates, length: int) -> None:
        super().__init__(num_envs, steps, spaces)
        self.states, self.length = states, length
        self.first_states = np.zeros((num_envs, steps // length, states.array.shape[1]), np.float32)

    def add(
        self,
        where: tuple[slice, int],
        observations: np.ndarray,
        actions: Actions,
        rewards: np.ndarray,
        result: StepResult,
        final_observations: np.ndarray,
    ) -> None:
        super().add(where, observations, actions, rewards, result, final_observations)
        rows, (sequence, offset) = where[0], divmod(where[1], self.length)
        if offset == 0:
            self.first_states[rows, sequence] = self.states.array[rows]

    def finish(self, next_observations: np.ndarray, kind: Bootstrap) -> RolloutBatch:
        starts = np.zeros_like(self.ends)  # at the first position the state is 0 already if an episode begins there
        starts[:, 1:] = self.ends[:, :-1]
        batch = super().finish(next_observations, kind)
        batch.inputs |= {
            "episode_starts": torch.from_numpy(starts),
            "hidden_states": torch.from_numpy(self.first_states),
        }
        return batch
