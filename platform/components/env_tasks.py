"""Several tasks in one run: the task of each environment, the input of the policy for it, and metrics per task."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rl_platform.config.schema.env import Env
from rl_platform.envs.embodied.success import Success, success_rates


class EnvTasks:
    """Environment i of the run, and episode i of an evaluation, does task i modulo their number.

    reads_instructions: the policy reads the instruction of a task. Other policies see the task in the observation or
    not at all.
    """

    def __init__(self, env: Env, *, reads_instructions: bool) -> None:
        self.names = [task.name for task in env.tasks]
        self._num_envs, self._given = env.num_envs, reads_instructions and bool(self.names)

    def whole_turns(self, count: int) -> int:
        """Returns the largest number up to `count` of environments that share the tasks evenly."""
        return count - count % max(len(self.names), 1)

    def read(self, rows: slice) -> np.ndarray | None:
        """Returns [N] int64: tasks of environments `rows`, for the policy; None: the policy does not read them."""
        return self._of(np.arange(rows.start or 0, rows.stop)) if self._given else None

    def inputs(self, choices: int) -> dict[str, Tensor]:
        """Returns the inputs of a rollout batch: "tasks" [num_envs,choices] int64, or nothing."""
        if not self._given:
            return {}
        tasks = torch.from_numpy(self._of(np.arange(self._num_envs)))
        return {"tasks": tasks[:, None].repeat(1, choices)}

    def metrics(
        self, prefix: str, numbers: Iterable[int], returns: Iterable[float], successes: Iterable[Success | None]
    ) -> dict[str, float]:
        """Returns PREFIX/TASK/return and the success rates per task with episodes. numbers: of their environments."""
        episodes = list(zip(numbers, returns, successes, strict=True))
        metrics: dict[str, float] = {}
        for task, name in enumerate(self.names):
            own = [(return_, success) for number, return_, success in episodes if number % len(self.names) == task]
            if own:
                metrics[f"{prefix}/{name}/return"] = float(np.mean([return_ for return_, _ in own]))
                metrics |= success_rates([success for _, success in own], f"{prefix}/{name}")
        return metrics

    def _of(self, numbers: np.ndarray) -> np.ndarray:
        tasks: np.ndarray = numbers % len(self.names)
        return tasks
