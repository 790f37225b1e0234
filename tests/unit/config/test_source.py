"""Scalars, lines and mistakes of YAML."""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.config.source import YamlReader


def read(text: str) -> tuple[Any, YamlReader]:
    reader = YamlReader("run.yaml")
    return reader.read(text), reader


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-2.5e+3", -2500.0),
        (".inf", float("inf")),
        ("10_000", 10_000),
        ("010", 10),
        ("0o10", 8),
        ("0x1f", 31),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("1:0", "1:0"),
        ("1:30:00", "1:30:00"),
        ("yes", "yes"),
        ("off", "off"),
        ("0-3", "0-3"),
        ("2026-01-01", "2026-01-01"),
        ("'8'", "8"),
        ("!!str 8", "8"),
        ("_1", "_1"),
        ("e5", "e5"),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    tree, reader = read(f"a: {text}\n")
    assert tree == {"a": value}
    assert type(tree["a"]) is type(value)
    assert not reader.problems


def test_a_placement_is_always_text() -> None:
    text = (
        "cluster:\n  component_placement:\n    actor: 1:0\n    critic: 0\n    reward: {node_group: 7, placement: 1:0}\n"
    )
    tree, _ = read(text)
    placement = {"actor": "1:0", "critic": "0", "reward": {"node_group": "7", "placement": "1:0"}}
    assert tree["cluster"]["component_placement"] == placement


def test_lines() -> None:
    _, reader = read("a:\n  b: 1\n  c: [1,\n    2]\nd: {e: 1}\n")
    lines = {key: place.rpartition(":")[2] for key, place in reader.where.items()}
    assert lines == {"": "1", "a": "1", "a.b": "2", "a.c": "3", "a.c[0]": "3", "a.c[1]": "4", "d": "5", "d.e": "5"}


@pytest.mark.parametrize(
    ("text", "key", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", 3, "twice"),
        ("s:\n  a: 1\n  a: 1\n", "s.a", 3, "twice"),
        ("a: !!python/object:x.Y {}\nb: !!python/name:x.y z\n", "b", 2, "tag"),
        ("a: !secret x\n", "a", 1, "tag"),
        ("? [1, 2]\n: 3\n", "config", 1, "must be text"),
        ("a: &x {b: *x}\n", "a.b", 1, "contains itself"),
        ("a: {<<: 3}\n", "a", 1, "merges mappings"),
        ("a: !!int x\n", "a", 1, "no int"),
    ],
)
def test_mistakes(text: str, key: str, line: int, message: str) -> None:
    _, reader = read(text)
    assert any(
        problem.key == key and problem.where == f"run.yaml:{line}" and message in problem.message
        for problem in reader.problems
    ), reader.problems


def test_anchors_and_merges() -> None:
    tree, reader = read("a: &x {lr: 1, eps: 2}\nb: {<<: *x, eps: 3}\nc: {<<: [*x, {more: 4}]}\nd: *x\n")
    assert tree["b"] == {"lr": 1, "eps": 3}
    assert tree["c"] == {"lr": 1, "eps": 2, "more": 4}
    assert tree["d"] == tree["a"]
    assert not reader.problems
