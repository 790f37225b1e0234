"""The interface of `env.backend: module:Class`: a class of the user that steps all environments of a process at once.

Not covered: videos and images that Gymnasium renders, several tasks, replacement of single environments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from gymnasium import Space

StepArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class EnvBackend(Protocol):
    """N environments of one kind. Subclasses may leave out `save`, `restore` and `close`.

    An episode depends on its seed and actions only, not on earlier episodes.

    episode_seeds: False: the seed of the first environment determines the episodes of all environments together, and
    other seeds have no effect.
    success: [N] bool, the success of each episode at its latest step; None: the task has no success.
    """

    episode_seeds: bool = True
    success: np.ndarray | None = None

    def __init__(self, num_envs: int, **options: object) -> None:
        """Builds the environments. options: `env.kwargs`.

        Every env process, every stage of `env.pipeline_stages` and the evaluation build an instance of their own.
        """

    @classmethod
    @abstractmethod
    def spaces(cls, **options: object) -> tuple[Space[object], Space[object]]:
        """Returns the observation and action space of one environment, without starting a simulator."""

    @abstractmethod
    def reset(self, which: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Starts episodes of environments `which` [K] int64; returns their first observations [K,*shape].

        A seed of None continues the random numbers of its environment.
        """

    @abstractmethod
    def step(self, actions: np.ndarray, idle: np.ndarray) -> StepArrays:
        """Steps all environments except the idle ones [N] bool. Idle ones must not change; their results are not read.

        actions: [N,*shape] of the action space, inside its bounds. Returns observations [N,*shape], rewards [N],
        terminated [N] bool, truncated [N] bool. The platform truncates episodes at `env.max_episode_steps`, and calls
        `reset` for episodes that ended.
        """

    def save(self, index: int) -> object:
        """Returns the state of one environment, of plain values, arrays and NumPy generators; None: cannot be saved."""
        return None

    def restore(self, index: int, state: Any) -> None:
        """Sets environment `index` to a state that `save` returned; it then continues bit for bit."""

    def close(self) -> None:
        """Ends the simulation."""


BACKEND = Extension(
    "environment backend",
    "env.backend",
    EnvBackend,
    "class(num_envs, **kwargs) with spaces, reset and step, from rl_platform.envs.embodied.user_backend.EnvBackend",
)
