"""Every key of the schema is read by something outside the config package: a key that acts nowhere is a broken promise.

Reads are found by name, so keys that share a last name (actor.optim.lr, critic.optim.lr) are not told apart.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rl_platform.config.describe import section_of, walk
from rl_platform.config.schema.cluster import NodeGroup

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "platform" / "config"


def attributes(tree: ast.AST) -> set[str]:
    """Names that are read as an attribute, as in `x.name`."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}


def read_names() -> set[str]:
    """Attributes read outside the config package, and what the config's own properties read if they are read there."""
    files = [file for folder in ("platform", "envs", "launch") for file in (ROOT / folder).rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files if CONFIG not in file.parents]
    names: set[str] = set().union(*map(attributes, trees))
    for file in CONFIG.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in names and _is_property(node):
                names |= attributes(node)
    for path, field in walk():  # a default such as runs/${runner.experiment_name} reads that key
        if path.rpartition(".")[2] in names and isinstance(field.default, str):
            names |= {key.rpartition(".")[2] for key in re.findall(r"\$\{(.+?)\}", field.default)}
    return names


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)


KEYS = sorted(
    {path for path, field in walk() if section_of(field.annotation) is None}
    | {f"cluster.node_groups[].{name}" for name in NodeGroup.model_fields}
)


@pytest.fixture(scope="module")
def names() -> set[str]:
    return read_names()


@pytest.mark.parametrize("key", KEYS)
def test_key_is_read(key: str, names: set[str]) -> None:
    assert key.rpartition(".")[2] in names, f"{key} is in the schema, and nothing outside platform/config reads it"


def test_the_search_finds_reads_and_no_writes() -> None:
    assert attributes(ast.parse("a.read\na.written = a.also_read\ncalled.method()")) == {"read", "also_read", "method"}
