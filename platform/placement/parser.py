"""Reads numbers and ranges from a text of a config and collects problems that point into it.

`grammar` gives them their meaning for placements.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from rl_platform.errors import Problem

_SPAN = re.compile(r"(0|[1-9][0-9]{0,8})(?:\s*-\s*(0|[1-9][0-9]{0,8}))?")
_MISTAKES = (  # pattern of the whole piece, message, hint
    (r"", "a number is missing", ""),
    (r"-\s*[0-9]+", "numbers cannot be negative", ""),
    (r"-|[0-9]+\s*-", "a range needs both ends", "as 0-3"),
    (r"[0-9]+\s*-\s*-\s*[0-9]+", "numbers cannot be negative", ""),
    (r"(0[0-9]+\b.*)|([0-9]+\s*-\s*0[0-9]+)", "numbers have no leading zeros", "YAML 1.1 takes 010 for octal"),
    (r"[0-9\s-]*[0-9]{10,}[0-9\s-]*", "the number is too large", "at most nine digits"),
    (r"[0-9]+(\s*-\s*[0-9]+){2,}", "a range has two ends, not more", "as 0-3"),
    (r"[0-9]+(\s+[0-9]+)+", "a comma is missing between the numbers", ""),
    (r"[0-9]+\s*(\.\.+|to|–|—|~)\s*[0-9]+", "ranges are written with a hyphen", "as 0-3"),
    (r"(?i:all)", "`all` is lower case and stands alone, on the resource side", "as all or all:0-3"),
)


class Text:
    """A text and its problems so far. `text` is empty if the YAML value is no text."""

    def __init__(self, value: object, path: str, allowed: str) -> None:
        self.path, self.allowed = path, allowed
        self.problems: list[Problem] = []
        self.text = self._from_yaml(value)

    def fail(self, position: int, message: str, hint: str = "", allowed: str = "", *, end: int | None = None) -> None:
        """Adds a problem with the piece from `position` to `end`, or to the next comma."""
        piece = self.text[position:end] if end is not None else self.text[position:].split(",")[0]
        self.problems.append(
            problem_at(self.path, self.text, position, piece.strip(), message, allowed or self.allowed, hint)
        )

    def split(self, separator: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the offsets of the pieces of text[start:end] without blanks around them; none for an invalid value."""
        if not self.text:
            return
        for piece in self.text[start:end].split(separator):
            blanks = len(piece) - len(piece.lstrip()) if piece.strip() else 0
            yield start + blanks, start + blanks + len(piece.strip())
            start += len(piece) + len(separator)

    def span(self, start: int, end: int) -> range | None:
        """Returns `n` or `a-b` in text[start:end] as a range."""
        piece = self.text[start:end]
        match = _SPAN.fullmatch(piece)
        if match is None:
            wrong = [(message, hint) for pattern, message, hint in _MISTAKES if re.fullmatch(pattern, piece)]
            message, hint = wrong[0] if wrong else ("this is neither a number nor a range", "")
        else:
            first, last = int(match[1]), int(match[2] or match[1])
            if first <= last:
                return range(first, last + 1)
            message, hint = "the range runs backwards", f"write {last}-{first}"
        self.fail(start, message, hint, end=end)
        return None

    def check_ascending(self, spans: Sequence[tuple[range, int]], noun: str) -> None:
        """Adds a problem at the first span (with its position) that is not above the previous one."""
        for (before, _), (span, position) in itertools.pairwise(spans):
            if span.start < before.stop:
                repeated = span.stop > before.start
                message = (
                    f"{noun} {max(span.start, before.start)} is named twice" if repeated else f"{noun}s must ascend"
                )
                self.fail(position, message, allowed=f"ascending {noun}s, each once")
                return

    def _from_yaml(self, value: object) -> str:
        message = hint = ""
        if isinstance(value, str) and value.strip():
            return value
        if value is None or isinstance(value, str):
            message = "the text is empty"
        elif isinstance(value, bool) or not isinstance(value, int):
            message = f"this must be a text, not {kind_of(value)}"
            if isinstance(value, list) and value and all(isinstance(item, int | str) for item in value):
                hint = 'write "' + ",".join(map(str, value)) + '"'
        elif value >= 60:  # 60 is the smallest number that YAML 1.1 makes of digits with a colon
            pair = f"{value // 60}:{value % 60}"
            message = f"the number {value} is ambiguous"
            hint = f'YAML 1.1 reads an unquoted {pair} as {value}: write "{pair}" or "{value}" in quotes'
        else:
            return str(value)
        shown = {"": '""', "None": "null", "True": "true", "False": "false"}.get(str(value).strip(), str(value))
        self.problems.append(Problem(self.path, message, value=shown, allowed=self.allowed, hint=hint))
        return ""


def problem_at(path: str, text: str, position: int, piece: str, message: str, allowed: str, hint: str) -> Problem:
    """Returns a problem with the whole text, the wrong piece and the position of its first character, from 1."""
    value = f'"{text}", character {position + 1}' + (f': "{piece}"' if piece else "")
    return Problem(key=path, message=message, value=value, allowed=allowed, hint=hint)


def kind_of(value: object) -> str:
    """Returns the kind of a YAML value in words."""
    kinds = {bool: "a truth value", int: "a number", float: "a fraction", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), type(value).__name__)
