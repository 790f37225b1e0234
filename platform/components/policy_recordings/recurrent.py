"""Recordings of recurrent policies: with the hidden states before each sequence."""

from __future__ import annotations

import numpy as np
import torch

from rl_platform.components.policy_rollout import Actions
from rl_platform.components.recording import HiddenStates, Recording, Where
from rl_platform.config.schema.algorithm import Bootstrap
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.vector import StepResult
from rl_platform.records import RolloutBatch


class RecurrentRecording(Recording):
    """Also records the hidden states before the first step of each sequence of `length` steps.

    `states` are those of the policy; `HiddenStates.advance` is called after each `add`.
    """

    def __init__(
        self, num_envs: int, steps: int, spaces: EnvSpaces, states: HiddenStates, length: int, turn: int = 1
    ) -> None:
        super().__init__(num_envs, steps, spaces, turn)
        self.states, self.length = states, length
        self.first_states = np.zeros((num_envs, steps // length, states.array.shape[1]), np.float32)

    def add(self, where: Where, observations: np.ndarray, actions: Actions, result: StepResult) -> None:
        super().add(where, observations, actions, result)
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
