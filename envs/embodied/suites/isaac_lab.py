"""Tasks of Isaac Lab 2 as an environment backend: one GPU steps all environments of a process in one call.

`env.backend: rl_platform.envs.embodied.suites.isaac_lab:IsaacLab` with `env.kwargs: {task: Isaac-Cartpole-v0,
observation_size: 4, action_size: 1}`, the time limit of the task in `env.max_episode_steps` and `env.num_workers: 1`,
because a process has one simulation. It imports isaaclab, so `env.python` is Isaac Lab's interpreter. It needs
Python 3.11 or later, so Isaac Sim 5 or later.

Tests use a stand-in with the interface of Isaac Lab; nothing here has run with Isaac Lab itself. Not covered: images,
action chunks, exact resume. Isaac Lab resets ended episodes itself, which has two consequences:

* The last observation of an episode is lost. The one before it takes its place, also in values of truncated episodes.
* The seed of the first environment determines the episodes of all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from rl_platform.envs.embodied.suites.packages import installed
from rl_platform.envs.embodied.user_backend import EnvBackend, StepArrays
from rl_platform.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch

GROUP = "policy"  # the observations for the policy


class IsaacLab(EnvBackend):
    """`num_envs` environments of a task of Isaac Lab's registry.

    observation_size, action_size: those of the task. device: of the simulation. package: the module whose import
    registers the tasks. launcher: arguments of Isaac Lab's `AppLauncher`.
    """

    episode_seeds = False

    @classmethod
    def spaces(cls, observation_size: int = 1, action_size: int = 1, **options: object) -> tuple[Box, Box]:
        return Box(-np.inf, np.inf, (observation_size,)), Box(-np.inf, np.inf, (action_size,))

    def __init__(
        self,
        num_envs: int,
        task: str = "Isaac-Cartpole-v0",
        observation_size: int = 1,
        action_size: int = 1,
        device: str = "cuda:0",
        package: str = "isaaclab_tasks",
        launcher: dict[str, object] | None = None,
    ) -> None:
        with installed("isaac_lab", "env.backend"):
            _launch(json.dumps({"headless": True, "device": device} | (launcher or {})))
            import_module(package)
            from isaaclab_tasks.utils import parse_env_cfg
        self._device = device
        self._env = gymnasium.make(task, cfg=parse_env_cfg(task, device=device, num_envs=num_envs)).unwrapped
        self._observations = self._observed(self._env.reset()[0])
        self._begun = np.ones(num_envs, bool)  # at the first observation of an episode
        self._skipped = np.zeros(num_envs, bool)  # idle in a step, in which Isaac Lab stepped them too
        for key, shape, given in (
            ("observation_size", self._observations.shape[1:], observation_size),
            ("action_size", self._env.single_action_space.shape, action_size),
        ):
            if shape != (given,):
                raise ConfigError([Problem(f"env.kwargs.{key}", f"{task} has shape {shape}", value=str(given))])

    def reset(self, which: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        if which[0] == 0 and seeds[0] is not None:  # with those of a resumed run the others follow one by one
            self._observations = self._observed(self._env.reset(seed=seeds[0])[0])
            self._begun[:] = True
        elif not self._begun[which].all():
            message = "an episode ended that Isaac Lab continues, by this limit or by a number that is not finite"
            raise ConfigError([Problem("env.max_episode_steps", message, hint="at least the limit of the task")])
        self._skipped[which] = False
        return self._observations[which]

    def step(self, actions: np.ndarray, idle: np.ndarray) -> StepArrays:
        if (self._skipped & ~idle).any():
            message = "Isaac Lab steps all environments, so none can wait for the end of a chunk of actions"
            raise ConfigError([Problem("actor.model.num_action_chunks", message, allowed="1")])
        import torch

        given = torch.as_tensor(actions, dtype=torch.float32, device=self._device)
        observations, rewards, *ends, _ = self._env.step(given)
        terminated, truncated = (end.cpu().numpy().astype(bool) for end in ends)
        before, self._observations = self._observations, self._observed(observations)
        self._begun, self._skipped = terminated | truncated, self._skipped | idle
        final = np.where(self._begun[:, None], before, self._observations)
        return final, rewards.cpu().numpy().copy(), terminated, truncated

    def close(self) -> None:
        self._env.close()  # the application remains, because its end is that of the process

    def _observed(self, observations: dict[str, torch.Tensor]) -> np.ndarray:
        array: np.ndarray = observations[GROUP].cpu().numpy()
        return array.copy()  # Isaac Lab may write the next observations into the same memory


@cache
def _launch(arguments: str) -> object:
    """Starts Isaac Sim once in this process, before modules of Isaac Lab are imported. arguments: JSON."""
    from isaaclab.app import AppLauncher

    return AppLauncher(**json.loads(arguments)).app
