"""Files of JSON lines that belong to steps: `metrics.jsonl`, `samples.jsonl` and `tokens.jsonl`.

A run that resumes continues such a file after the step of its checkpoint. Lines of later steps are cut, lines that
cannot be read are moved to `<name>.damaged`. Not covered: which values a line holds.
"""

from __future__ import annotations

import codecs
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_platform.disk import sync, sync_folder
from rl_platform.errors import DataError, ranges

log = logging.getLogger(__name__)

Line = dict[str, Any]  # a JSON object: numbers and texts by name

_EXACT = 2**53  # float64 holds every smaller whole number


class StepLines:
    """Appends lines to the file `path`, after its lines up to `resumed_step`; None: the file begins empty.

    contiguous: the file has one line per step. A step without a readable line then gets a line with its number only,
    so that the steps from the first line to `resumed_step` have no gap. Raises OSError if the disk fails.
    """

    def __init__(self, path: Path, resumed_step: int | None, contiguous: bool) -> None:
        if path.exists():
            _restore(path, -1 if resumed_step is None else resumed_step, contiguous)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        sync_folder(path.parent)

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one line, which other processes can read when this returns."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns when every line is on the disk."""
        sync(self._file)

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, *, texts: bool = True) -> Iterator[Line]:
    """Yields the records of a file, one at a time; a torn last line is left out. texts: values may be texts.

    Raises DataError, with line and key, for a line that is not a JSON object with a step or that has another value.
    Raises OSError for a file that cannot be read.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _record(line, texts)
            except ValueError as error:
                advice = f"Remove the line, or resume the run, which moves it to {path.name}.damaged"
                raise DataError(f"{path}:{number}: {error}. {advice}") from error


def _record(line: bytes, texts: bool = True) -> Line:
    """Returns the record of a line. Raises ValueError, which says what is wrong with it."""
    try:
        record: Line = json.loads(line.decode("utf-8-sig"))  # some editors write a byte order mark
        has_step = isinstance(record, dict) and type(record.get("step")) is int and record["step"] >= 0
    except (ValueError, RecursionError):
        has_step = False
    if not has_step:
        shown = line[:80].decode("utf-8", "backslashreplace").rstrip("\n")
        raise ValueError(f"not a JSON object with a step: {shown!r}")
    for name, value in record.items():
        if not (_is_number(value) or value is None or (texts and isinstance(value, str))):
            kinds = "a finite number, a text or null" if texts else "a finite number or null"
            shown = f"a {type(value).__name__}" if isinstance(value, dict | list) else json.dumps(value)
            raise ValueError(f"{name}: not {kinds}: {shown:.80}")
    return record


def _is_number(value: object) -> bool:
    """Returns whether a float can hold `value`. NaN is read as null."""
    if isinstance(value, int):
        return abs(value) <= _EXACT
    return isinstance(value, float) and not math.isinf(value)


def _restore(path: Path, last: int, contiguous: bool) -> None:
    """Rewrites the file with its lines of steps up to `last`, in order; damaged lines go to `<name>.damaged`."""
    places: list[tuple[int, int]] = []  # step and offset: the lines of a long run do not stay in memory
    damaged: list[tuple[int, bytes]] = []
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):  # a kill may have torn the last line
                try:
                    step = _record(line)["step"]
                except ValueError:
                    damaged.append((number, line))
                else:
                    if step <= last:
                        places.append((step, offset))
            offset += len(line)
        missing: set[int] = set()
        if contiguous and places:
            own = dict(places)  # of two lines of a step the later one counts
            missing = set(range(min(own), last + 1)) - own.keys()
            places = [*own.items(), *((step, -1) for step in missing)]
        part = path.with_suffix(".tmp")
        with open(part, "wb") as target:
            for step, offset in sorted(places):
                if offset >= 0:
                    file.seek(offset)
                line = json.dumps({"step": step}).encode() + b"\n" if offset < 0 else file.readline()
                target.write(line.removeprefix(codecs.BOM_UTF8))
            sync(target)
    _report(path, damaged, sorted(missing))
    os.replace(part, path)


def _report(path: Path, damaged: list[tuple[int, bytes]], missing: list[int]) -> None:
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        with open(aside, "ab") as file:
            file.writelines(line for _, line in damaged)
        lines = _ranges([number for number, _ in damaged])
        log.warning("%s: line %s cannot be read and was moved to %s", path, lines, aside.name)
    if missing:
        log.warning("%s: the metrics of step %s are lost; their lines hold the step only", path, _ranges(missing))


def _ranges(numbers: list[int]) -> str:
    """Returns numbers as `1, 4-6`."""
    runs = ranges(numbers)
    return ", ".join(runs[:10]) + (f" and {len(runs) - 10} more ranges" if len(runs) > 10 else "")
