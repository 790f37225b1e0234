"""Reads the rows of files: JSON Lines, JSON, CSV and Parquet. Not covered: the meaning of the columns (`rows.py`)."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.text_files import NotUTF8, text_of

MAX_DEPTH = 50  # of lists and objects inside a row, which processes send to each other
_TOO_DEEP = f"more than {MAX_DEPTH} lists or objects inside each other"
Row = tuple[str, dict[str, object]]  # the place in the file, for messages, and the columns


class _RepeatedKey(ValueError):
    """An object of a JSON file has two values of one key, of which Python keeps the last."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the object. Raises _RepeatedKey."""
    item = dict(pairs)
    if len(item) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        values = " and ".join(shown(value) for name, value in pairs if name == repeated)
        raise _RepeatedKey(f"an object has the key {shown(repeated)} more than once, with {values}: keep one of them")
    return item


_JSON = json.JSONDecoder(object_pairs_hook=_unique)


def json_lines(contents: bytes, path: Path) -> list[Row]:
    """Returns the rows of a file with one JSON object per line, without blank lines. Raises DataError."""
    if not contents.isascii() or b"\0" in contents:
        _text(contents, path)  # raises for another encoding; the lines are split as bytes, as a text may hold U+2028
    lines = enumerate(contents.splitlines(), start=1)
    return [(f"{path}:{number}", _json_row(line, f"{path}:{number}")) for number, line in lines if line.strip()]


def json_array(contents: bytes, path: Path) -> list[Row]:
    """Returns the rows of a file that holds one JSON array of objects. Raises DataError."""
    try:
        items = _JSON.decode(_text(contents, path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}.") from error
    except _RepeatedKey as error:
        raise DataError(f"{path}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: {_too_large(error)}.") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: a JSON array of objects is needed, not {shown(items)}.")
    return [
        (where, _object(item, where)) for number, item in enumerate(items, 1) for where in [f"{path}, row {number}"]
    ]


def csv_table(contents: bytes, path: Path) -> list[Row]:
    """Returns the rows of a comma-separated file whose first line names the columns. Raises DataError."""
    csv.field_size_limit(sys.maxsize)  # by default longer texts than 131,072 characters are refused
    reader = csv.DictReader(io.StringIO(_text(contents, path), newline=""), strict=True)
    rows: list[Row] = []
    try:
        _check_columns(reader.fieldnames or (), f"{path}:1")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{where}: the header names {len(reader.fieldnames or ())} columns, this row has others."
                )
            rows.append((where, dict(row)))
    except csv.Error as error:
        # the reader counts a line when its row is complete
        raise DataError(f"{path}:{reader.line_num + 1}: not CSV: {error}, in the row that begins here.") from error
    return rows


def parquet_table(contents: bytes, path: Path) -> list[Row]:
    """Returns the rows of a Parquet file. Bytes are read as UTF-8; other values without a JSON form, such as dates,
    become text.

    Raises DataError for other contents, ConfigError without pyarrow.
    """
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        hint = "pip install -c constraints/cpu.txt -e '.[data]'"
        message = "a Parquet file is read by pyarrow, which is not installed"
        raise ConfigError([Problem("data.task.path", message, value=str(path), hint=hint)]) from error
    try:
        _check_columns(parquet.read_schema(io.BytesIO(contents)).names, str(path))
        rows = parquet.read_table(io.BytesIO(contents)).to_pylist()
    except DataError:
        raise
    except Exception as error:  # of any type, as pyarrow parses the file
        raise DataError(f"{path}: not Parquet: {error}") from error
    return [(f"{path}, row {number}", plain(row)) for number, row in enumerate(rows, 1)]


READERS: dict[str, Callable[[bytes, Path], list[Row]]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": csv_table,
    ".parquet": parquet_table,
}


def plain(row: dict[str, object]) -> dict[str, object]:
    """Returns the row with values that JSON has; others, such as dates, become text."""
    values: dict[str, object] = json.loads(json.dumps(row, default=_as_text))
    return values


def _as_text(value: object) -> str:
    """Returns the text of a value. Spark and Impala store texts as bytes."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:  # a picture, for example
        return str(value)


def _check_columns(names: Sequence[str], where: str) -> None:
    """Raises DataError for a column name that occurs twice: a row would have the values of the last one only."""
    repeated = next((name for name in names if name and list(names).count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{where}: several columns have the name '{repeated}': rename all but one.")


def shown(value: object) -> str:
    """Returns the value as JSON, shortened to 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = f"{'[' * 60}"
    return text if len(text) <= 60 else text[:57] + "..."


def _text(contents: bytes, path: Path) -> str:
    try:
        return text_of(contents, path)
    except NotUTF8 as error:
        raise DataError(f"{path}:{error.line}: {error}. Convert it: {error.hint}") from error


def _json_row(line: bytes, where: str) -> dict[str, object]:
    try:
        row = _JSON.decode(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{where}:{error.colno}: not JSON: {error.msg}. Each line must be one JSON object.") from error
    except _RepeatedKey as error:
        raise DataError(f"{where}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {_too_large(error)}.") from error
    return _object(row, where)


def _too_large(error: ValueError | RecursionError) -> str:
    """Returns why Python cannot read a value: a number of over 4,300 digits, or thousands of nested lists."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    return "a number has more than 4,300 digits: write it as a text"


def _object(row: object, where: str) -> dict[str, object]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is needed, not {shown(row)}.")
    if _is_deeper(row, MAX_DEPTH):
        raise DataError(f"{where}: {_TOO_DEEP}.")
    return row


def _is_deeper(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _is_deeper(each, depth - 1) for each in inner if isinstance(each, dict | list))
