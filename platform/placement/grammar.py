"""Reads `cluster.component_placement` into frozen entries, with exact problems for a text that cannot be read.

Grammar: comma-separated segments `resources[:ranks]`; each side `n` or `a-b`, `all` alone on the resource side. Without
ranks, every resource gets one rank and numbering continues from the segment before. The scheduler checks whether the
resources exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl_platform.config.suggest import nearest
from rl_platform.errors import Problem
from rl_platform.placement.parser import Text, kind_of, problem_at

COMPONENTS = ("actor", "critic", "actor_critic", "reference", "rollout", "reward", "env")
PATH = "cluster.component_placement"
MAX_RANKS = 100_000  # of one component; a typo like 0:0-999999999 must fail, not fill the memory

_ALLOWED = (
    'segments resources[:ranks] separated by commas, each side n or a-b, or all: "0-3", "0-7:0-3", "0-3,8-11", "all"'
)
_ALLOWED_NODES = 'n or a-b separated by commas: "0-1,3"'
_LONG_FORM = ("node_group", "placement")


@dataclass(frozen=True)
class Segment:
    """`resources:ranks`. `resources` is None for `all`; `ranks` is None only for an `all` without ranks.

    `position` is the offset of the segment in its text, for messages.
    """

    resources: range | None
    ranks: range | None
    position: int = field(default=0, compare=False)

    def __str__(self) -> str:
        resources = "all" if self.resources is None else _show(self.resources)
        return resources if self.ranks is None else f"{resources}:{_show(self.ranks)}"


@dataclass(frozen=True)
class Entry:
    """One key of `component_placement`: the components that share hosts, and the segments of their ranks."""

    components: tuple[str, ...]
    segments: tuple[Segment, ...]
    node_group: str | None
    path: str  # dotted key of the placement text
    text: str

    def problem(self, segment: Segment, message: str, *, allowed: str = "", hint: str = "") -> Problem:
        """Returns a problem that points at `segment` of this entry's text."""
        piece = self.text[segment.position :].split(",")[0].strip()
        return problem_at(self.path, self.text, segment.position, piece, message, allowed, hint)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean critic?` for the nearest known name, or an empty text."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""


def read(component_placement: Mapping[str, object]) -> tuple[list[Entry], list[Problem]]:
    """Returns all readable entries in the config's order, and all problems of the others."""
    problems: list[Problem] = []
    entries: list[Entry] = []
    named: dict[str, str] = {}
    if not component_placement:
        problems.append(
            Problem(PATH, "no component is placed", value="{}", allowed=_ALLOWED, hint='as "actor,critic,rollout": all')
        )
    for key, value in component_placement.items():
        components = _components(key, named, problems)
        entry = _entry(f"{PATH}.{key}", components, value, problems)
        if entry is not None:
            entries.append(entry)
    if "actor" in named and "actor_critic" in named:
        problems.append(
            Problem(
                f"{PATH}.{named['actor_critic']}",
                "actor_critic and actor are two names of one component",
                value=f"actor is placed by {named['actor']!r}",
                allowed="one of the two",
                hint="embodied: keep actor_critic; reasoning: keep actor",
            )
        )
    return entries, problems


def parse(value: object, path: str) -> tuple[tuple[Segment, ...], list[Problem]]:
    """Returns the segments of one placement text (or of the number that YAML made of it) and all its problems."""
    text = Text(value, path, _ALLOWED)
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
    text = Text(value, path, _ALLOWED_NODES)
    spans = [(text.span(start, end), start) for start, end in text.split(",", 0, len(text.text))]
    readable = [(span, start) for span, start in spans if span is not None]
    if not text.problems:
        text.check_ascending(readable, "node")
    return (() if text.problems else tuple(span for span, _ in readable)), text.problems


def uneven(resources: range | None, ranks: range | None) -> tuple[str, str] | None:
    """Returns message and allowed values if neither count divides the other, else None. None for an unknown count."""
    if resources is None or ranks is None or len(resources) % len(ranks) == 0 or len(ranks) % len(resources) == 0:
        return None
    count = len(resources)
    divisors = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
    return (
        f"{count} resources and {len(ranks)} ranks do not divide one another",
        f"{', '.join(divisors)} ranks (a rank owns several resources), or a multiple of {count} (they share)",
    )


def _components(key: str, named: dict[str, str], problems: list[Problem]) -> tuple[str, ...]:
    """Returns the component names of one key. `named`: the key of each component so far; it is extended."""
    components: list[str] = []
    position = 0
    for piece in key.split(","):
        name = piece.strip()
        message = hint = ""
        if not name:
            message, hint = "a component name is missing", "there is a comma too many" if key.strip() else ""
        elif name not in COMPONENTS:
            message, hint = f"no component is called {name!r}", did_you_mean(name, COMPONENTS)
        elif name in named:
            again = "twice in this key" if named[name] == key else f"by {named[name]!r} too"
            message, hint = f"{name} is placed {again}", "place every component once"
        if message:
            start = position + (piece.index(name) if name else 0)
            problems.append(problem_at(f"{PATH}.{key}", key, start, name, message, ", ".join(COMPONENTS), hint))
        else:
            named[name] = key
            components.append(name)
        position += len(piece) + 1
    return tuple(components)


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
        message, hint = f"a node group is a name, not {kind_of(node_group)}", f'quote it: "{node_group}"'
        problems.append(Problem(f"{path}.node_group", message, value=str(node_group), hint=hint))
        return None
    return node_group


def _segment(text: Text, start: int, end: int, following: int) -> Segment | None:
    """Returns the segment at text[start:end]. Without ranks they start at `following`."""
    sides = list(text.split(":", start, end))
    message = hint = ""
    if start == end:
        message, hint = "a segment is empty", "there is a comma too many"
    elif len(sides) > 2:
        message, hint = "a segment has one colon at most", "resources, a colon, ranks"
    elif sides[0][0] == sides[0][1]:
        message = "no resources stand before the colon"
    elif sides[-1][0] == sides[-1][1]:
        message, hint = "no ranks stand after the colon", "leave out the colon for one rank on each resource"
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


def _check_segments(text: Text, segments: list[Segment]) -> None:
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


def _check_ranks(text: Text, spans: list[tuple[range, int]]) -> None:
    total = sum(len(ranks) for ranks, _ in spans)
    if total > MAX_RANKS:
        text.fail(0, f"{total} ranks are too many", allowed=f"at most {MAX_RANKS} ranks")
        return
    expected = 0
    for ranks, position in sorted(spans, key=lambda pair: pair[0].start):
        if ranks.start != expected:
            hint = ""
            if expected == 0:
                message = f"ranks must start at 0, these start at {ranks.start}"
                hint = "ranks follow the colon; without a colon every resource gets one rank"
            else:
                message = (
                    f"rank {expected} is missing" if ranks.start > expected else f"rank {ranks.start} is named twice"
                )
            text.fail(position, message, hint, f"the ranks 0-{total - 1}, each once")
            return
        expected = ranks.stop


def _show(span: range) -> str:
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
