"""Builds the training and validation questions of `data.task`."""

from __future__ import annotations

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.digits import digit_questions
from rl_platform.envs.reasoning.jsonl import jsonl_questions
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.reasoning_gym import reasoning_gym_questions
from rl_platform.errors import ConfigError, Problem


def build_questions(data: Data, seed: int) -> Split:
    """Returns the questions of `data.task`. Equal configs and seeds give equal questions in the same order.

    Raises ConfigError for unknown names and too few questions, DataError for unreadable files.
    """
    task = data.task
    if task is None:
        raise ConfigError([Problem("data.task", "missing: a reasoning run needs questions")])
    if task.type in ("jsonl", "file"):
        return jsonl_questions(data, task)
    if task.type == "reasoning_gym":
        return reasoning_gym_questions(data, task, seed)
    return digit_questions(data, task, seed)
