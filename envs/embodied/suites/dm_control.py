"""Tasks of dm-control's suite and of its manipulation set as Gymnasium environments.

`env.id: rl_platform.envs.embodied.suites.dm_control:Suite` with `env.kwargs: {domain: cheetah, task: run}`, or
`...:Manipulation` with `{task: reach_site_features}`. Imports dm_control, so usually in an interpreter of its own
(`env.python`).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from rl_platform.envs.embodied.suites.dm_control_speed import quicken
from rl_platform.envs.embodied.suites.names import check_name

if TYPE_CHECKING:
    from dm_control import composer
    from dm_control.rl import control

_LAST = 2  # of dm_env.StepType
LIMIT = 1_000  # steps of an episode of the suite; rewards are in [0, 1], so the return is at most this


class _Tasks(gymnasium.Env[np.ndarray, np.ndarray]):
    """A dm_control environment; observations are joined in the order of the task, as float32 numbers.

    A task ends its own episodes: with discount 0 if it failed, else by its limit of steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012 - as Gymnasium declares it
    max_path_length = LIMIT  # the task has a limit of its own
    draws_with_mujoco = True

    def __init__(
        self,
        env: control.Environment | composer.Environment,
        random: np.random.RandomState,
        render_mode: str | None,
        width: int,
        height: int,
    ) -> None:
        """random: the state from which the task draws."""
        quicken()
        self._env, self._random = env, random
        self.render_mode, self._size = render_mode, (height, width)
        shapes = [part.shape for part in env.observation_spec().values()]
        ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
        self._parts = [(slice(*ends[i : i + 2]), len(shape) > 1) for i, shape in enumerate(shapes)]
        self.observation_space = Box(-np.inf, np.inf, (ends[-1],), np.float32)
        actions = env.action_spec()
        low, high = (np.broadcast_to(bound, actions.shape) for bound in (actions.minimum, actions.maximum))
        self.action_space = Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        return self._joined(self._env.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        step_type, reward, discount, observation = self._env.step(action)
        ended = step_type == _LAST
        failed = ended and discount == 0.0
        return self._joined(observation), float(reward or 0.0), failed, ended and not failed, {}

    def render(self) -> np.ndarray:
        pixels: np.ndarray = self._env.physics.render(*self._size, camera_id=0)
        return pixels

    def close(self) -> None:
        self._env.close()

    def _joined(self, parts: dict[str, np.ndarray]) -> np.ndarray:
        joined = np.empty(self._parts[-1][0].stop, np.float32)
        for (where, shaped), part in zip(self._parts, parts.values(), strict=True):
            joined[where] = part.ravel() if shaped else part
        return joined


class Suite(_Tasks):
    """A task of `dm_control.suite`; `domain` and `task` as in its `load`."""

    def __init__(
        self, domain: str, task: str, render_mode: str | None = None, width: int = 320, height: int = 240
    ) -> None:
        with _without_warnings():
            from dm_control import suite

            check_name("domain", domain, {name for name, _ in suite.ALL_TASKS})
            check_name("task", task, {name for each, name in suite.ALL_TASKS if each == domain})
            env = suite.load(domain, task)
        super().__init__(env, env.task.random, render_mode, width, height)


class Manipulation(_Tasks):
    """A task of `dm_control.manipulation`, by its name; those whose names end with `features` observe states."""

    def __init__(self, task: str, render_mode: str | None = None, width: int = 320, height: int = 240) -> None:
        with _without_warnings():
            from dm_control import manipulation

            check_name("task", task, manipulation.ALL)
            env = manipulation.load(task)
        logging.getLogger("absl").addFilter(_of_no_attempt)
        super().__init__(env, env.random_state, render_mode, width, height)


def _of_no_attempt(record: logging.LogRecord) -> bool:
    """Drops the warnings about poses that inverse kinematics did not reach at a start: dm_control draws another one,
    and raises an error of its own after the last attempt."""
    return not record.getMessage().startswith("Failed to converge after")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides the warnings of graphics libraries that find no screen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
