"""Makes questions of stored rows: files (`tables.py`) and Hugging Face datasets (`hub.py`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rl_platform.config.schema.data import Data, QuestionTask
from rl_platform.disk import read_regular
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.envs.reasoning.sources.hub import dataset_rows
from rl_platform.envs.reasoning.sources.tables import READERS, Row, shown
from rl_platform.errors import DataError
from rl_platform.records import Message

LARGEST_WHOLE = 2.0**53  # up to which floats hold every whole number
ROLES = ("system", "user", "assistant")
GAPS = {"nan", "<na>", "nat"}  # in lower case
"""Texts that pandas' `astype(str)` makes of a missing value. `#### nan` is an answer."""

_THOUSANDS = re.compile(r"[-+]?[^\w\s,()\[\]{}]*\d{1,3}(?:,\d{3})+(?!\d)[^,;()\[\]{}]*")
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")  # as pandas writes a list into CSV


def stored_questions(data: Data, task: QuestionTask) -> Split:
    """Returns the questions of `task.path`, and for validation the first data.val_size ones of `val_path` (dataset:
    `val_split`), or else the last ones of `path`. With a data.train_size of 0 the first ones of `path` are validation
    and none is trained on; other values of data.train_size do not apply.

    Raises DataError with file and row for invalid contents, ConfigError without the library that reads the format.
    """
    assert task.path is not None  # a rule of the config
    questions = _read(task, task.path, task.split)
    if not data.train_size:
        return Split(train=[], validation=questions[: data.val_size])
    if not data.val_size:
        return Split(train=questions, validation=[])
    if task.val_path is not None or task.val_split is not None:
        validation = _read(task, task.val_path or task.path, task.val_split)
        unused = max(len(validation) - data.val_size, 0)
        return Split(train=questions, validation=validation[: data.val_size], unused=unused)
    if len(questions) <= data.val_size:
        raise DataError(
            f"{task.path}: {len(questions)} questions, of which data.val_size: {data.val_size} are held out for "
            "validation. None is left for training: lower data.val_size or set data.task.val_path."
        )
    return Split(train=questions[: -data.val_size], validation=questions[-data.val_size :])


def rows_of(task: QuestionTask, path: str, split: str | None) -> list[Row]:
    """Returns the rows of a file, or of a split of a dataset. Raises DataError, and ConfigError without the library
    that reads the format."""
    if task.type == "dataset":
        return dataset_rows(path, task.name, split)
    suffix = ".jsonl" if task.type == "jsonl" else Path(path).suffix.lower()
    return file_rows(Path(path), task.prompt_column, task.answer_column, READERS[suffix])


def _read(task: QuestionTask, path: str, split: str | None) -> list[Question]:
    rows = rows_of(task, path, split)
    if not rows:
        raise DataError(f"{path}: split {split or 'train'} holds no questions.")
    return list(questions_of(rows, task.prompt_column, task.answer_column))


def file_rows(
    path: Path, prompt_column: str, answer_column: str | None, reader: Callable[[bytes, Path], list[Row]]
) -> list[Row]:
    """Returns the rows of a file, without blank lines. Raises DataError for an unreadable file and for one without
    rows."""
    try:
        contents = read_regular(path)
    except (OSError, ValueError) as error:
        rows = "one JSON object per line" if reader is READERS[".jsonl"] else "rows"
        fields = " and ".join(f"'{column}'" for column in (prompt_column, answer_column) if column is not None)
        hint = f"path and val_path name files with {rows} with the fields {fields}"
        reason = getattr(error, "strerror", None) or error
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"{path}: cannot be read{place}: {reason}. {hint}, see docs/reasoning.md#your-own-questions."
        ) from error
    rows_read = reader(contents, path)
    if not rows_read:
        raise DataError(f"{path}: the file holds no questions ({len(contents.splitlines())} lines).")
    return rows_read


def questions_of(rows: Iterable[Row], prompt_column: str, answer_column: str | None) -> Iterator[Question]:
    """Yields the question of each row. A dotted name is a field of a nested column; other columns become metadata.

    A prompt is a text, or a list of messages that ends with a user's. Raises DataError with the place of the row.
    """
    for where, row in rows:
        prompt = column(row, prompt_column, where)
        answer = "" if answer_column is None else _answer(column(row, answer_column, where), answer_column, where)
        text = prompt
        messages: tuple[Message, ...] = ()
        if isinstance(prompt, list):
            messages = _messages(prompt, f"{where}: column '{prompt_column}'")
            spoken = [f"{message['role']}: {message['content']}" for message in messages]
            text = messages[0]["content"] if len(messages) == 1 else "\n\n".join(spoken)
        if isinstance(prompt, str) and _MESSAGES_AS_TEXT.match(prompt):
            needed = "holds a list of messages as one text, which the policy would read as it is: store the list itself"
            raise DataError(
                f"{where}: column '{prompt_column}' {needed}, in JSON Lines or Parquet, not {shown(prompt)}."
            )
        if not isinstance(text, str) or not text.strip():
            needed = "must be a text that is not empty, or a list of messages"
            raise DataError(f"{where}: column '{prompt_column}' {needed}, not {shown(prompt)}.")
        _encodable(text, prompt_column, where)
        metadata = {name: value for name, value in row.items() if name != prompt_column}
        yield Question(text, answer, metadata, messages, where=where)


def final_answer(solution: str) -> str:
    """Returns the text after `####` (GSM8K), or the whole text if there is no `####`.

    A number after `####` loses its thousands separators. The commas of lists, tuples and sets stay.
    """
    _, mark, final = solution.rpartition("####")
    final = final.strip()
    return final.replace(",", "") if mark and _THOUSANDS.fullmatch(final) else final


def column(row: dict[str, object], name: str, where: str) -> object:
    """Returns the value of a column; `a.b` is the key b of a mapping a. Raises DataError for a missing column."""
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            there = ", ".join(_columns(row)) or "none"
            raise DataError(f"{where}: no column '{name}'. Columns there: {there}.")
        value = value[part]
    return value


def _columns(row: dict[str, object]) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in _columns(value))
        else:
            yield name


def _answer(answer: object, column: str, where: str) -> str:
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < LARGEST_WHOLE:
        answer = int(answer)  # pandas makes floats of whole numbers, and no response says 3.0
    typed = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    missing = isinstance(answer, float) and not math.isfinite(answer)  # pandas and json.dumps write a gap as NaN
    if not typed or missing or not final_answer(str(answer)):
        needed = "must be a text that is not empty, or a number"
        raise DataError(f"{where}: column '{column}' {needed}, not {shown(answer)}.")
    if str(answer).strip().lower() in GAPS:
        gap = f"is {shown(answer)}, which pandas writes for a missing value: remove the row"
        raise DataError(f"{where}: column '{column}' {gap}, or write '#### {str(answer).strip()}' if it is the answer.")
    return _encodable(final_answer(str(answer)), column, where)


def _encodable(text: str, column: str, where: str) -> str:
    """Returns the text. Raises DataError for half of a surrogate pair, which JSON can hold and no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        needed = f"holds {half} without its other half, which is no character: correct or remove it"
        raise DataError(f"{where}: column '{column}' {needed}.") from error
    return text


def _messages(items: list[object], where: str) -> tuple[Message, ...]:
    messages: list[Message] = []
    for number, item in enumerate(items, 1):
        at = f"{where}, message {number}"
        fields = {} if not isinstance(item, dict) else {name: each for name, each in item.items() if each is not None}
        if fields.keys() != {"role", "content"}:
            raise DataError(f"{at}: must have the fields role and content and no others, not {shown(item)}.")
        if fields["role"] not in ROLES:
            raise DataError(f"{at}: role {shown(fields['role'])} must be one of {', '.join(ROLES)}.")
        if not isinstance(fields["content"], str) or not fields["content"].strip():
            raise DataError(f"{at}: content must be a text that is not empty, not {shown(fields['content'])}.")
        messages.append({"role": fields["role"], "content": fields["content"]})
    if not messages or messages[-1]["role"] != "user":
        raise DataError(f"{where}: the last message must have the role user, because the policy answers it.")
    return tuple(messages)
