"""Generates questions with the package reasoning-gym. Not covered: scoring, see `verifiers.py`.

The package is imported on first use, which takes about a second.
"""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rl_platform.config.schema.data import Data, QuestionTask
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.errors import ConfigError, Problem
from rl_platform.suggest import did_you_mean

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

REPEATS_BEFORE_GIVING_UP = 1_000


def reasoning_gym_questions(data: Data, task: QuestionTask, seed: int) -> Split:
    """Returns distinct questions in the generator's order: first `val_size` for validation, then `train_size` more.

    Validation therefore does not depend on train_size. `data.task.params.seed` replaces the run's seed. Raises
    ConfigError for an unknown dataset or parameter, and if there are too few distinct questions.
    """
    dataset = _create(task, seed)
    wanted = data.val_size + data.train_size
    questions: dict[str, Question] = {}
    draws = repeats = 0
    while len(questions) < wanted and repeats < REPEATS_BEFORE_GIVING_UP:
        question = _draw(dataset, draws, task)
        draws += 1
        repeats = 0 if questions.setdefault(question.key, question) is question else repeats + 1
    if len(questions) < wanted:
        raise ConfigError([_too_few(data, task, len(questions), draws)])
    distinct = list(questions.values())
    return Split(train=distinct[data.val_size :], validation=distinct[: data.val_size])


def _create(task: QuestionTask, seed: int) -> ProceduralDataset:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS:
        near = get_close_matches(task.name or "", DATASETS, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"one of the {len(DATASETS)} datasets of reasoning-gym"
        problem = Problem("data.task.name", "no such reasoning_gym dataset", value=str(task.name), hint=hint)
        raise ConfigError([problem])
    allowed = [field.name for field in dataclasses.fields(DATASETS[task.name][1]) if field.name != "size"]
    problems = [_unknown_parameter(task, name, allowed) for name in task.params if name not in allowed]
    if problems:
        raise ConfigError(problems)
    try:
        # Items are generated from seed + index. `size` only limits iteration, which is not used here.
        return reasoning_gym.create_dataset(task.name, **{"seed": seed, **task.params})
    except (AssertionError, TypeError, ValueError) as error:
        problem = Problem(
            "data.task.params", f"refused by dataset {task.name}: {error or 'invalid value'}", value=str(task.params)
        )
        raise ConfigError([problem]) from error


def _unknown_parameter(task: QuestionTask, name: str, allowed: list[str]) -> Problem:
    hint = "reduce data.train_size and data.val_size" if name == "size" else did_you_mean(name, allowed)
    message = f"dataset {task.name} has no such parameter"
    return Problem(
        f"data.task.params.{name}", message, value=str(task.params[name]), allowed=", ".join(allowed), hint=hint
    )


def _draw(dataset: ProceduralDataset, index: int, task: QuestionTask) -> Question:
    try:
        item = dataset[index]
    except Exception as error:
        message = f"dataset {task.name} cannot generate question {index}: {type(error).__name__}: {error}"
        raise ConfigError([Problem("data.task.params", message, value=str(task.params))]) from error
    return Question(text=item["question"], answer=str(item["answer"]), metadata=dict(item["metadata"]))


def _too_few(data: Data, task: QuestionTask, distinct: int, draws: int) -> Problem:
    return Problem(
        "data.train_size",
        f"dataset {task.name} with params {task.params} has too few distinct questions: "
        f"{distinct} found in {draws} draws",
        value=f"train_size {data.train_size} + val_size {data.val_size} = {data.train_size + data.val_size}",
        allowed=f"train_size + val_size up to about {distinct}",
        hint="lower the sizes, or widen the dataset's parameters",
    )
