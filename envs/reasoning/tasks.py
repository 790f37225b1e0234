"""Builds the training and validation questions of `data.task` or `data.sources`."""

from __future__ import annotations

from dataclasses import replace

from rl_platform.config.schema.data import Data, QuestionTask, Source
from rl_platform.envs.reasoning.digits import digit_questions
from rl_platform.envs.reasoning.question import SOURCE_COLUMN, Question, Split
from rl_platform.errors import DataError, problems_of
from rl_platform.extras import required


def build_questions(data: Data, seed: int) -> Split:
    """Returns the questions of all sources, in their order. Equal configs and seeds give equal questions.

    Training questions that any source validates are removed. Raises ConfigError for unknown names and too few
    questions, DataError for unreadable files.
    """
    splits = [(task, _split(data, key, task, seed)) for key, task in data.tasks]
    validation = [question for _, split in splits for question in split.validation]
    held_out = {question.key for question in validation}
    train: list[Question] = []
    repeated = 0
    for task, split in splits:
        distinct = [question for question in split.train if question.key not in held_out]
        if split.train and not distinct:
            place = task.path or task.name or task.type
            raise DataError(
                f"{place}: all {len(split.train)} training questions are also validation questions, up to case and "
                "spacing. The prompts of training and validation must differ."
            )
        train += distinct
        repeated += len(split.train) - len(distinct)
    return Split(train, validation, sum(split.unused for _, split in splits), repeated)


def _split(data: Data, key: str, task: QuestionTask, seed: int) -> Split:
    if not isinstance(task, Source):
        return _questions(data, task, seed)
    sizes = {"val_size": data.validation_size(task), "train_size": data.train_size if task.weight else 0}
    with problems_of(key, "data.task"):
        split = _questions(data.model_copy(update=sizes), task, seed)
    train, validation = ([_of_source(each, task.label) for each in part] for part in (split.train, split.validation))
    return Split(train, validation, unused=split.unused)


def _of_source(question: Question, label: str) -> Question:
    """Returns the question with the label of its source. A column of that name keeps its value under another one."""
    columns = dict(question.metadata)
    if "source" in columns:
        columns[SOURCE_COLUMN] = columns["source"]
    return replace(question, source=label, metadata={**columns, "source": label})


def _questions(data: Data, task: QuestionTask, seed: int) -> Split:
    if task.type == "digits":
        return digit_questions(data, task, seed)
    with required("rl_platform.envs.reasoning.sources", "data.task.type", hint="data.task.type: digits"):
        from rl_platform.envs.reasoning.sources.reasoning_gym import reasoning_gym_questions
        from rl_platform.envs.reasoning.sources.rows import stored_questions
    if task.type == "reasoning_gym":
        return reasoning_gym_questions(data, task, seed)
    return stored_questions(data, task)
