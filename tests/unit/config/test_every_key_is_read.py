"""Every key of the schema is read outside the config package: a key that acts nowhere is a broken promise.

A read is an attribute of an expression whose section is evident in its file: `config.actor.optim.lr`, or `optim.lr` of
a variable that is annotated with `Optim` or assigned from something named `optim`. Keys of one section class that
stands in several places (`actor.optim`, `critic.optim`) are not told apart.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rl_platform.config.describe import section_at, section_of
from rl_platform.config.explanations.accepted_values import walk
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import NodeGroup
from rl_platform.config.schema.data import Source
from rl_platform.config.schema.env import EnvTask
from rl_platform.config.schema.reward import WeightedReward
from rl_platform.config.schema.section import Section

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "platform" / "config"
IN_LISTS = {"node_groups": NodeGroup, "sources": Source, "functions": WeightedReward, "tasks": EnvTask}
KEYS = {path: section_at(path.rpartition(".")[0]) for path, field in walk() if section_of(field.annotation) is None}
KEYS |= {f"{path}[].{name}": section for path, section in IN_LISTS.items() for name in section.model_fields}

Kinds = set[type[Section]]  # the section classes that an expression may be of


def subclasses(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for child in section.__subclasses__():
        yield from subclasses(child)


CLASSES = {section.__name__: section for section in subclasses(Section)}
# The sections by the last name of their key.
NAMED: dict[str, Kinds] = defaultdict(set, config={Config}, **{name: {section} for name, section in IN_LISTS.items()})
for key, field in walk():
    if (kind := section_of(field.annotation)) is not None:
        NAMED[key.rpartition(".")[2]].add(kind)


def annotated(annotation: ast.expr | None) -> Kinds:
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
    return {CLASSES[name] for name in names & CLASSES.keys()}


def kinds(node: ast.expr, variables: dict[str, Kinds]) -> Kinds:
    """What sections an expression may be: by its last name, or that of its parts."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return NAMED[name] | variables[name]
        case ast.Call(func=part) | ast.Subscript(value=part):
            return kinds(part, variables)
        case ast.BoolOp(values=parts) | ast.Dict(values=parts) | ast.Tuple(elts=parts):
            return set().union(*(kinds(part, variables) for part in parts))
        case ast.IfExp(body=one, orelse=other):
            return kinds(one, variables) | kinds(other, variables)
    return set()


def variables_of(tree: ast.AST, returned: dict[str, Kinds]) -> dict[str, Kinds]:
    """The sections that names of a file stand for: parameters, annotations, assignments, loops, called functions."""
    variables = defaultdict(set, {name: set(sections) for name, sections in returned.items()})
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.arg(arg=name, annotation=annotation)
                | ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=annotation)
            ):
                variables[name] |= annotated(annotation)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs += zip(targets, values, strict=False)
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                pairs.append((target, value))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pairs.append((target, value))
    for target, value in pairs * 2:  # a variable may be assigned from one that stands below
        if isinstance(target, ast.Name | ast.Attribute):
            variables[target.id if isinstance(target, ast.Name) else target.attr] |= kinds(value, variables)
    return variables


def reads(tree: ast.AST, variables: dict[str, Kinds]) -> set[tuple[type[Section], str]]:
    """(section, key) of every attribute that is read and not written."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    return {(section, node.attr) for node in nodes for section in kinds(node.value, variables)}


def parsed(files: Iterable[Path]) -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def keys_read() -> set[tuple[type[Section], str]]:
    """Reads outside the config package, and those of its properties and functions that are used outside."""
    sources = [file for folder in ("platform", "envs", "launch") for file in (ROOT / folder).rglob("*.py")]
    outside = parsed(file for file in sources if CONFIG not in file.parents)
    inside = parsed(CONFIG.rglob("*.py"))
    returned: dict[str, Kinds] = defaultdict(set)
    for node in (node for tree in (*outside, *inside) for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            returned[node.name] |= annotated(node.returns)
    names: set[tuple[type[Section], str]] = set().union(
        *(reads(tree, variables_of(tree, returned)) for tree in outside)
    )
    imported = {
        alias.name
        for tree in outside
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in (node for tree in inside for node in tree.body if getattr(node, "name", None) in imported):
        if isinstance(node, ast.FunctionDef):
            names |= reads(node, variables_of(node, returned))
    classes = [node for tree in inside for node in tree.body if isinstance(node, ast.ClassDef) and node.name in CLASSES]
    for _ in range(3):  # properties that properties read
        for owner in classes:
            section = CLASSES[owner.name]
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and (section, node.name) in names:
                    names |= reads(node, variables_of(node, {**returned, "self": {section}}))
    return names


@pytest.mark.slow
def test_every_key_is_read() -> None:
    names = keys_read()
    unread = []
    for key, section in KEYS.items():
        related = {*section.__mro__, *subclasses(section)}  # a function for every Trainable reads keys of the actor
        if not any((kind, key.rpartition(".")[2]) in names for kind in related):
            unread.append(key)
    assert not unread, "nothing outside platform/config reads these keys of the schema"


def test_reads_are_told_from_writes_and_sections_from_each_other() -> None:
    tree = ast.parse("def f(chosen: Optim):\n  chosen.lr\n  config.env.seed\n  other.lr\n  config.data.x = 1")
    optim, env = CLASSES["Optim"], CLASSES["Env"]
    assert {(optim, "lr"), (env, "seed"), (Config, "env"), (Config, "data")} == reads(tree, variables_of(tree, {}))
