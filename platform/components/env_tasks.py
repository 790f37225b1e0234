"""Several tasks in one run: which environment does which, what the policy is told of it, and how each one goes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rl_platform.config.schema.env import Env
from rl_platform.envs.embodied.success import Success, success_rates


class EnvTasks:
    """Environment i of the run, and episode i of an evaluation, does task i modulo their number.

    `reads_instructions`: the policy is told the tasks of what it observes; others see them in the observation or not at
    all.
    """

    def __init__(self, env: Env, *, reads_instructions: bool) -> None:
        self.names = [task.name for task in env.tasks]
        self._num_envs, self._told = env.num_envs, reads_instructions and bool(self.names)

    def whole_turns(self, count: int) -> int:
        """The largest number up to `count` of environments that share the tasks evenly."""
        return count - count % max(len(self.names), 1)

    def read(self, rows: slice) -> np.ndarray | None:
        """[N] int64: tasks of environments `rows`, for the policy; None: it is not told."""
        return self._of(np.arange(rows.start or 0, rows.stop)) if self._told else None

    def inputs(self, choices: int) -> dict[str, Tensor]:
        """What the rows of a rollout hold of it: "tasks" [num_envs,choices] int64, or nothing."""
        if not self._told:
            return {}
        tasks = torch.from_numpy(self._of(np.arange(self._num_envs)))
        return {"tasks": tasks[:, None].repeat(1, choices)}

    def metrics(
        self, prefix: str, numbers: Iterable[int], returns: Iterable[float], successes: Iterable[Success | None]
    ) -> dict[str, float]:
        """Of each task that had episodes, PREFIX/TASK/return and the success rates; numbers: of their environments."""
        episodes = list(zip(numbers, returns, successes, strict=False))  # older checkpoints know fewer numbers
        found: dict[str, float] = {}
        for task, name in enumerate(self.names):
            own = [(return_, success) for number, return_, success in episodes if number % len(self.names) == task]
            if own:
                found[f"{prefix}/{name}/return"] = float(np.mean([return_ for return_, _ in own]))
                found |= success_rates([success for _, success in own], f"{prefix}/{name}")
        return found

    def _of(self, numbers: np.ndarray) -> np.ndarray:
        tasks: np.ndarray = numbers % len(self.names)
        return tasks
