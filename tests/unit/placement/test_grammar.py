"""The grammar of placements: what it reads, that it reads back what it writes, what it says about malformed texts."""

from __future__ import annotations

import datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.config.placement_names import SHOWN
from rl_platform.config.schema.cluster import COMPONENTS, PLACEMENT
from rl_platform.placement.grammar import MAX_RANKS, Segment, parse, parse_nodes, read

KEY = f"{PLACEMENT}.actor,critic"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [(range(1), range(1))]),
        (0, [(range(1), range(1))]),
        (59, [(range(59, 60), range(1))]),
        ("60", [(range(60, 61), range(1))]),
        ("1:0", [(range(1, 2), range(1))]),
        ("0-3", [(range(4), range(4))]),
        ("0-3,8-11", [(range(4), range(4)), (range(8, 12), range(4, 8))]),
        ("0-7:0-3", [(range(8), range(4))]),
        ("0-1:0-7", [(range(2), range(8))]),
        ("0-3:0-1,4-5", [(range(4), range(2)), (range(4, 6), range(2, 4))]),
        ("0-3:4-7,4-7:0-3", [(range(4), range(4, 8)), (range(4, 8), range(4))]),
        ("all", [(None, None)]),
        ("all:0-3", [(None, range(4))]),
        ("  0 - 3 : 0 - 1 , 6 ", [(range(4), range(2)), (range(6, 7), range(2, 3))]),
        ("\tall : 0\n", [(None, range(1))]),
        ("5-5", [(range(5, 6), range(1))]),
    ],
)
def test_reads(text: object, expected: list[tuple[range | None, range | None]]) -> None:
    segments, problems = parse(text, KEY)
    assert problems == []
    assert segments == tuple(Segment(*pair) for pair in expected)


# text, part of the message, the wrong piece with the position of its first character (counted from 1); whole messages
# of the usual mistakes are in `bad_placements.yaml`
MALFORMED = [
    ("0,3-1", "the range runs backwards", 3, "3-1"),
    ("0-3:3-0", "the range runs backwards", 5, "3-0"),
    ("0--1", "numbers cannot be negative", 1, "0--1"),
    ("0-3:-1", "numbers cannot be negative", 5, "-1"),
    ("-", "a range needs both ends", 1, "-"),
    (",0-3", "a segment is empty", 1, ""),
    ("0,,1", "a segment is empty", 3, ""),
    (":", "there are no resources before the colon", 1, ":"),
    ("0-07", "no leading zeros", 1, "0-07"),
    ("0–3", "written with a hyphen", 1, "0–3"),
    ("all:all", "only entry of the resource side", 5, "all"),
    ("0,all", "`all` leaves nothing", 3, "all"),
    ("٣", "neither a number nor a range", 1, "٣"),
    ("9" * 5000, "the number is too large", 1, "9" * 5000),
    ("0,0", "resource 0 is named twice", 3, "0"),
    ("all:1-4", "ranks must start at 0, these start at 1", 1, "all:1-4"),
    ("0-1:0-1,2-3:1-2", "rank 1 is named twice", 9, "2-3:1-2"),
    ("0-1,2-4:2-3", "3 resources and 2 ranks do not divide", 5, "2-4:2-3"),
    ("0:0-999999998", "999999999 ranks are too many", 1, "0:0-999999998"),
]


@pytest.mark.parametrize(("text", "message", "position", "piece"), MALFORMED)
def test_malformed_text(text: str, message: str, position: int, piece: str) -> None:
    entries, problems = read({"actor,critic": text})
    assert entries == []
    (problem,) = problems
    assert problem.key == KEY
    assert message in problem.message
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    assert problem.value == f'"{shown}", character {position}' + (f': "{piece[:SHOWN]}"' if piece else "")
    assert problem.allowed


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("   ", "the text is empty", ""),
        (60, "the number 60 is ambiguous", 'YAML 1.1 reads an unquoted 1:0 as 60: write "1:0" or "60" in quotes'),
        (483, "the number 483 is ambiguous", 'write "8:3" or "483"'),
        (-1, "numbers cannot be negative", ""),
        (1.5, "must be a text, not a fraction", ""),
        (["0-3"], "must be a text, not a list", ""),
        (datetime.date(2026, 1, 2), "must be a text, not date", ""),
    ],
)
def test_value_that_is_no_text(value: object, message: str, hint: str) -> None:
    _, (problem,) = read({"actor,critic": value})
    assert problem.key == KEY
    assert message in problem.message
    assert problem.allowed
    assert problem.value
    assert hint in problem.hint


def test_the_number_that_yaml_makes_of_a_colon_is_refused_and_the_quoted_one_read() -> None:
    assert yaml.safe_load("rollout: 1:0") == {"rollout": 60}
    _, (problem,) = read(yaml.safe_load("rollout: 1:0"))
    assert '"1:0"' in problem.hint
    entries, problems = read(yaml.safe_load('rollout: "1:0"'))
    assert problems == []
    assert entries[0].segments == (Segment(range(1, 2), range(1)),)


@pytest.mark.parametrize(
    ("key", "message", "position", "hint"),
    [
        ("", "a component name is missing", 1, ""),
        ("actor,,critic", "a component name is missing", 7, "a comma too many"),
        ("actor, critc", "no component is called 'critc'", 8, "did you mean critic?"),
        ("Actor", "no component is called 'Actor'", 1, "did you mean actor?"),
        ("actor-critic", "no component is called 'actor-critic'", 1, "did you mean actor_critic?"),
        ("trainer", "no component is called 'trainer'", 1, ""),
    ],
)
def test_malformed_key(key: str, message: str, position: int, hint: str) -> None:
    _, (problem,) = read({key: "0"})
    assert problem.key == f"{PLACEMENT}.{key}"
    assert message in problem.message
    assert f"character {position}" in problem.value
    assert all(name in problem.allowed for name in COMPONENTS)
    assert hint in problem.hint


def test_keys_name_components_that_share_hosts_and_may_hold_blanks() -> None:
    entries, problems = read({" actor , critic": "0", "rollout": "1"})
    assert problems == []
    assert [entry.components for entry in entries] == [("actor", "critic"), ("rollout",)]


def test_long_form() -> None:
    entries, problems = read({"reward": {"node_group": "cpu", "placement": "0-1:0-31"}, "env": {"placement": "all"}})
    assert problems == []
    assert [(entry.node_group, entry.path) for entry in entries] == [
        ("cpu", f"{PLACEMENT}.reward.placement"),
        (None, f"{PLACEMENT}.env.placement"),
    ]


@pytest.mark.parametrize(
    ("value", "key", "message", "hint"),
    [
        ({"placement": "0", "ranks": "0"}, ".ranks", "unknown key", ""),
        ({}, "", "lacks its placement", ""),
        ({"node_group": 4090, "placement": "0"}, ".node_group", "a node group is a name", 'quote it: "4090"'),
        ({"node_group": "cpu", "placement": None}, ".placement", "the text is empty", ""),
        ({"node_group": "cpu", "placement": {"placement": "0"}}, ".placement", "not a mapping", ""),
        ({"node_group": "cpu", "placement": "0-x"}, ".placement", "neither a number nor a range", ""),
    ],
)
def test_malformed_long_form(value: object, key: str, message: str, hint: str) -> None:
    entries, (problem,) = read({"reward": value})
    assert entries == []
    assert problem.key == f"{PLACEMENT}.reward{key}"
    assert message in problem.message
    assert hint in problem.hint


def test_all_problems_of_all_keys_at_once() -> None:
    entries, problems = read({"actor": "3-1,x", "critc": "0:", "reward": {"placement": "", "group": "a"}, "env": "0"})
    assert [entry.components for entry in entries] == [("env",)]
    assert [problem.key.removeprefix(f"{PLACEMENT}.") for problem in problems] == [
        "actor", "actor", "critc", "critc", "reward.group", "reward.placement",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [("0", [range(1)]), (3, [range(3, 4)]), ("0-1, 3", [range(2), range(3, 4)])]
)
def test_reads_node_ranks(text: object, expected: list[range]) -> None:
    assert parse_nodes(text, "nodes") == (tuple(expected), [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        ("all", "`all`"),
        ("0-1,1", "node 1 is named twice"),
        ("2,0", "nodes must ascend"),
        ("0,,1", "a number is missing"),
        ("0:1", "neither a number nor a range"),
        (True, "must be a text"),
    ],
)
def test_malformed_node_ranks(text: object, message: str) -> None:
    spans, (problem,) = parse_nodes(text, "nodes")
    assert spans == ()
    assert message in problem.message


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """Valid segments: counts that divide, ascending resources with gaps, ranks 0..N-1 dealt out in any order."""
    if draw(st.integers(0, 5)) == 0:
        return [Segment(None, draw(st.one_of(st.none(), st.integers(1, 40).map(range))))]
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=1, max_size=5))
    counts = [(few, few * factor) if flip else (few * factor, few) for few, factor, flip in shapes]
    rank_ranges: dict[int, range] = {}
    start = 0
    for index in draw(st.permutations(range(len(counts)))):
        rank_ranges[index] = range(start, start + counts[index][1])
        start = rank_ranges[index].stop
    segments, first = [], 0
    for index, (resources, _) in enumerate(counts):
        first += draw(st.integers(0, 3))
        segments.append(Segment(range(first, first + resources), rank_ranges[index]))
        first += resources
    return segments


@given(segment_lists(), st.lists(st.sampled_from(["", " ", "  "]), min_size=4, max_size=4))
def test_reads_back_what_it_writes(segments: list[Segment], blanks: list[str]) -> None:
    text = ",".join(map(str, segments))
    assert parse(text, KEY) == (tuple(segments), [])
    for separator, blank in zip("-:,", blanks, strict=False):
        text = text.replace(separator, f"{blank}{separator}{blanks[3]}")
    assert parse(text, KEY) == (tuple(segments), [])


@given(st.text(alphabet="0123456789,:- alx", max_size=12))
def test_any_text_is_read_or_explained(text: str) -> None:
    segments, problems = parse(text, KEY)
    assert bool(segments) != bool(problems)
    assert all(problem.key == KEY and problem.message and problem.allowed for problem in problems)
    ranks = sorted(rank for segment in segments if segment.ranks is not None for rank in segment.ranks)
    assert ranks == list(range(len(ranks)))
    assert len(ranks) <= MAX_RANKS
    if segments:
        assert parse(",".join(map(str, segments)), KEY) == (segments, [])
