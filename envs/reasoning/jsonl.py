"""Reads questions from files: JSON Lines, also in GSM8K's format, or the formats of `tables.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rl_platform.config.schema.data import Data, Task
from rl_platform.disk import read_regular
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.envs.reasoning.tables import READERS, Row, shown
from rl_platform.errors import ConfigError, DataError, Problem


def jsonl_questions(data: Data, task: Task) -> Split:
    """Returns training questions of `path`, and the first val_size questions of `val_path` or else the last of `path`.

    Training questions that are also in validation are removed. data.train_size does not apply. Raises DataError with
    file and line for invalid contents, ConfigError without a path or without the library that reads the format.
    """
    if task.path is None:
        raise ConfigError(
            [Problem("data.task.path", f"missing, but data.task.type is {task.type}", allowed="a file of questions")]
        )

    def read(path: str) -> list[Question]:
        suffix = ".jsonl" if task.type == "jsonl" else Path(path).suffix.lower()
        return read_questions(Path(path), task.prompt_column, task.answer_column, READERS[suffix])

    train = read(task.path)
    if task.val_path is not None:
        validation = read(task.val_path)[: data.val_size]
    elif len(train) <= data.val_size:
        raise DataError(
            f"{task.path}: {len(train)} questions, of which data.val_size: {data.val_size} are held out for "
            "validation. None is left for training: lower data.val_size or set data.task.val_path."
        )
    else:
        train, validation = train[: -data.val_size], train[-data.val_size :]
    held_out = {question.key for question in validation}
    distinct = [question for question in train if question.key not in held_out]
    if not distinct:
        raise DataError(f"{task.path}: all {len(train)} training questions are also validation questions.")
    return Split(train=distinct, validation=validation, removed=len(train) - len(distinct))


def read_questions(
    path: Path, prompt_column: str, answer_column: str, reader: Callable[[bytes, Path], list[Row]] = READERS[".jsonl"]
) -> list[Question]:
    """Returns the questions of a file, without blank lines. Other columns become metadata. Raises DataError."""
    try:
        contents = read_regular(path)
    except (OSError, ValueError) as error:
        rows = "one JSON object per line" if reader is READERS[".jsonl"] else "rows"
        needed = f"{rows} with the fields '{prompt_column}' and '{answer_column}'"
        hint = f"data.task.path and val_path name files with {needed}, see docs/reasoning.md#your-own-questions"
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. {hint}.") from error
    questions = [_question(row, where, prompt_column, answer_column) for where, row in reader(contents, path)]
    if not questions:
        raise DataError(f"{path}: the file holds no questions ({len(contents.splitlines())} lines).")
    return questions


def final_answer(solution: str) -> str:
    """Returns the text after `####` (GSM8K) without thousands separators, or the whole text if there is no `####`."""
    _, mark, final = solution.rpartition("####")
    return final.strip().replace(",", "") if mark else solution.strip()


def _question(row: dict[str, object], where: str, prompt_column: str, answer_column: str) -> Question:
    for column in (prompt_column, answer_column):
        if column not in row:
            raise DataError(f"{where}: no column '{column}'. Columns there: {', '.join(row) or 'none'}.")
    text, answer = row.pop(prompt_column), row[answer_column]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: column '{prompt_column}' must be a text that is not empty, not {shown(text)}.")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not final_answer(str(answer)):
        raise DataError(f"{where}: column '{answer_column}' must be a text or a number, not {shown(answer)}.")
    return Question(text=text, answer=final_answer(str(answer)), metadata=row)
