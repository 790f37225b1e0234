"""Reads `cluster.component_placement` into frozen entries, with exact problems for a text that cannot be read.

Grammar: comma-separated segments `resources[:ranks]`; each side `n` or `a-b`, `all` alone on the resource side. Without
ranks, every resource gets one rank and numbering continues from the segment before. The scheduler checks whether the
resources exist.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rl_platform.config.placement_names import SHOWN, problem_at, read_names
from rl_platform.config.schema.cluster import PLACEMENT
from rl_platform.errors import Problem, ranges
from rl_platform.suggest import did_you_mean

MAX_PIECES = 1_000  # of a text
MAX_RANKS = 100_000  # of one component; a typo like 0:0-999999999 must fail, not fill the memory

_ALLOWED = (
    'segments resources[:ranks] separated by commas, each side n or a-b, or all: "0-3", "0-7:0-3", "0-3,8-11", "all"'
)
_ALLOWED_NODES = 'n or a-b separated by commas: "0-1,3"'
_LONG_FORM = ("node_group", "placement")
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
    (
        r"(?i:cpus?|nodes?|none)",
        "a rank without accelerator is placed on a node",
        "{node_group: node, placement: 0}",
    ),
    (r"(?i:gpu|cuda)\s*[0-9]+", "an accelerator is a number", "as 0"),
    (r"(?i:all)", "`all` is lower case and the only entry of the resource side", "as all or all:0-3"),
)


@dataclass(frozen=True)
class Segment:
    """`resources:ranks`. `resources` is None for `all`; `ranks` is None only for an `all` without ranks.

    `position` is the offset of the segment in its text, for messages.
    """

    resources: range | None
    ranks: range | None
    position: int = field(default=0, compare=False)

    def __str__(self) -> str:
        resources = "all" if self.resources is None else ranges(self.resources)[0]
        return resources if self.ranks is None else f"{resources}:{ranges(self.ranks)[0]}"


@dataclass(frozen=True)
class Entry:
    """One key of `component_placement`: the components that share hosts, and the segments of their ranks."""

    components: tuple[str, ...]
    segments: tuple[Segment, ...]
    node_group: str | None
    path: str  # dotted key of the placement text
    text: str

    def problem(self, segment: Segment, message: str, *, allowed: str = "", hint: str = "") -> Problem:
        """Returns a problem that points at `segment`."""
        piece = self.text[segment.position :].split(",")[0].strip()
        return problem_at(self.path, self.text, segment.position, piece, message, allowed, hint)


def read(component_placement: Mapping[str, object]) -> tuple[list[Entry], list[Problem]]:
    """Returns all readable entries in the config's order, and all problems of the others."""
    names, of_names = read_names(component_placement)
    problems: list[Problem] = []
    entries: list[Entry] = []
    if not component_placement:
        hint = 'as "actor,critic,rollout": all'
        problems.append(Problem(PLACEMENT, "no component is placed", value="{}", allowed=_ALLOWED, hint=hint))
    for key, value in component_placement.items():
        path = f"{PLACEMENT}.{key}"
        of_name = [problem for problem in of_names if problem.key == path]
        problems += of_name
        if of_name and value is None:  # YAML reads `rollout:0` as a key without a value
            continue
        entry = _entry(path, names[key], value, problems)
        if entry is not None:
            entries.append(entry)
    return entries, problems


def parse(value: object, path: str) -> tuple[tuple[Segment, ...], list[Problem]]:
    """Returns the segments of one placement text (or of the number that YAML made of it) and all its problems."""
    text = _Text(value, path, _ALLOWED)
    segments: list[Segment] = []
    following = 0
    for start, end in text.split(",", 0, len(text.text)):
        segment = _segment(text, start, end, following)
        if segment is not None:
            segments.append(segment)
            following = segment.ranks.stop if segment.ranks is not None else following
    if not text.problems:
        _check_segments(text, segments)
    return (() if text.problems else tuple(segments)), text.problems


def parse_nodes(value: object, path: str) -> tuple[tuple[range, ...], list[Problem]]:
    """Returns the node ranks of a node group, as `0-1,3`, and all their problems."""
    text = _Text(value, path, _ALLOWED_NODES)
    spans = [(text.span(start, end), start) for start, end in text.split(",", 0, len(text.text))]
    readable = [(span, start) for span, start in spans if span is not None]
    if not text.problems:
        text.check_ascending(readable, "node")
    return (() if text.problems else tuple(span for span, _ in readable)), text.problems


def uneven(resources: range | None, ranks: range | None) -> tuple[str, str] | None:
    """Returns message and allowed values if neither count divides the other; None otherwise.

    A count that is None is not known yet, so it has no problem.
    """
    if resources is None or ranks is None or len(resources) % len(ranks) == 0 or len(ranks) % len(resources) == 0:
        return None
    count = len(resources)
    divisors = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
    return (
        f"{count} resources and {len(ranks)} ranks do not divide one another",
        f"{', '.join(divisors)} ranks (a rank owns several resources), or a multiple of {count} (they share)",
    )


def _entry(path: str, components: tuple[str, ...], value: object, problems: list[Problem]) -> Entry | None:
    """Returns the entry of a value, short (a text) or long ({node_group, placement}); None if it cannot be read."""
    before = len(problems)
    node_group: str | None = None
    if isinstance(value, Mapping):
        node_group = _long_form(path, value, problems)
        if "placement" not in value:
            return None
        path, value = f"{path}.placement", value["placement"]
    segments, segment_problems = parse(value, path)
    problems += segment_problems
    if len(problems) > before or not components:
        return None
    return Entry(components, segments, node_group, path, str(value))


def _long_form(path: str, value: Mapping[object, object], problems: list[Problem]) -> str | None:
    """Checks the keys of a long form and returns its node group."""
    for name in value:
        if name not in _LONG_FORM:
            hint = did_you_mean(str(name), _LONG_FORM)
            problems.append(Problem(f"{path}.{name}", "unknown key", allowed=", ".join(_LONG_FORM), hint=hint))
    if "placement" not in value:
        problems.append(Problem(path, "the long form lacks its placement", value=str(dict(value)), allowed=_ALLOWED))
    node_group = value.get("node_group")
    if node_group is not None and not isinstance(node_group, str):
        message, hint = f"a node group is a name, not {_kind_of(node_group)}", f'quote it: "{node_group}"'
        problems.append(Problem(f"{path}.node_group", message, value=str(node_group), hint=hint))
        return None
    return node_group


def _segment(text: _Text, start: int, end: int, following: int) -> Segment | None:
    """Returns the segment at text[start:end]. Without ranks they start at `following`."""
    sides = list(text.split(":", start, end))
    message = hint = ""
    if start == end:
        message, hint = "a segment is empty", "there is a comma too many"
    elif len(sides) > 2:
        message, hint = "a segment has one colon at most", "resources, a colon, ranks"
    elif sides[0][0] == sides[0][1]:
        message = "there are no resources before the colon"
    elif sides[-1][0] == sides[-1][1]:
        message, hint = "there are no ranks after the colon", "leave out the colon for one rank on each resource"
    if message:
        text.fail(start, message, hint, end=end)
        return None
    before = len(text.problems)
    resources = None if text.text[slice(*sides[0])] == "all" else text.span(*sides[0])
    ranks = text.span(*sides[1]) if len(sides) == 2 else None
    if len(text.problems) > before:
        return None
    if ranks is None and resources is not None:
        ranks = range(following, following + len(resources))
    return Segment(resources, ranks, start)


def _check_segments(text: _Text, segments: list[Segment]) -> None:
    """Checks all segments together: `all` with others, order of resources, counts, ranks other than 0..N-1."""
    for segment in segments:
        if segment.resources is None and len(segments) > 1:
            text.fail(segment.position, "`all` leaves nothing for other segments", allowed="all, or all:ranks, alone")
            return
    spans = [(segment.resources, segment.position) for segment in segments if segment.resources is not None]
    text.check_ascending(spans, "resource")
    for segment in segments:
        wrong = uneven(segment.resources, segment.ranks)
        if wrong is not None:
            text.fail(segment.position, wrong[0], allowed=wrong[1])
    _check_ranks(text, [(segment.ranks, segment.position) for segment in segments if segment.ranks is not None])


def _check_ranks(text: _Text, spans: list[tuple[range, int]]) -> None:
    total = sum(len(ranks) for ranks, _ in spans)
    if total > MAX_RANKS:
        text.fail(0, f"{total} ranks are too many", allowed=f"at most {MAX_RANKS} ranks")
        return
    expected = 0
    for ranks, position in sorted(spans, key=lambda pair: pair[0].start):
        if ranks.start != expected:
            message, hint = f"rank {expected} is missing", ""
            if expected == 0:
                message = f"ranks must start at 0, these start at {ranks.start}"
                hint = "ranks follow the colon; without a colon every resource gets one rank"
            elif ranks.start < expected:
                message = f"rank {ranks.start} is named twice"
            text.fail(position, message, hint, f"the ranks 0-{total - 1}, each once")
            return
        expected = ranks.stop


class _Text:
    """A text and its problems so far. `text` is empty if the YAML value is no text."""

    def __init__(self, value: object, path: str, allowed: str) -> None:
        self.path, self.allowed = path, allowed
        self.problems: list[Problem] = []
        self.text = self._from_yaml(value)

    def fail(self, position: int, message: str, hint: str = "", allowed: str = "", *, end: int | None = None) -> None:
        """Adds a problem with the piece from `position` to `end`, or to the next comma."""
        piece = (self.text[position:end] if end is not None else self.text[position:].split(",")[0]).strip()
        allowed = allowed or self.allowed
        self.problems.append(problem_at(self.path, self.text, position, piece, message, allowed, hint))

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
                message = f"{noun}s must ascend"
                if span.stop > before.start:
                    message = f"{noun} {max(span.start, before.start)} is named twice"
                self.fail(position, message, allowed=f"ascending {noun}s, each once")
                return

    def _from_yaml(self, value: object) -> str:
        message = hint = ""
        if isinstance(value, str) and value.count(",") >= MAX_PIECES:
            message, shown, hint = f"more than {MAX_PIECES} segments", f"{value[:SHOWN]}...", "write ranges, as 0-3"
            self.problems.append(Problem(self.path, message, value=shown, allowed=self.allowed, hint=hint))
            return ""
        if isinstance(value, str) and value.strip():
            return value
        if value is None or isinstance(value, str):
            message = "the text is empty"
            if value is None:  # YAML reads {a,b: 0} as {a: null, b: 0}
                hint = 'in braces quote a key with commas, as {"actor,critic": all}'
        elif isinstance(value, bool) or not isinstance(value, int):
            message = f"this must be a text, not {_kind_of(value)}"
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


def _kind_of(value: object) -> str:
    kinds = {bool: "a truth value", int: "a number", float: "a fraction", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), type(value).__name__)
