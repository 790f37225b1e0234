"""`private_torch.yaml` lists every private name of torch in the sources, and the installed torch has them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[3]
TABLE = yaml.safe_load((Path(__file__).parent / "private_torch.yaml").read_text())
FOLDERS = ("platform", "launch", "envs", "api")
MEMBERS = {  # private members of objects, whose classes the source does not name
    "_cdata": "torch.UntypedStorage._cdata",
    "_parameters": "torch.nn.Module._parameters",
    "_buffers": "torch.nn.Module._buffers",
    "_non_persistent_buffers_set": "torch.nn.Module._non_persistent_buffers_set",
}


def found(name: str) -> object:
    """Returns the object of a dotted name, whose leading parts are modules; None if there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            result: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            result = getattr(result, part, None)
        return result
    return None


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    named = parts[0] == "torch" and all(part.isidentifier() for part in parts)
    return named and any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_names(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    imported: dict[str, str] = {}  # by the name that the source gives it
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            yield from (name for one in node.names if is_private(name := f"{node.module}.{one.name}"))
        elif isinstance(node, ast.Import):
            imported |= {one.asname: one.name for one in node.names if one.asname}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {node.value for node in attributes}  # a.b of a.b.c
    for node in attributes:
        first, dot, rest = ast.unparse(node).partition(".")
        if is_private(name := f"{imported.get(first, first)}{dot}{rest}"):
            yield from () if node in inner else (name,)
        elif node.attr in MEMBERS and first not in ("self", "cls"):
            yield MEMBERS[node.attr]


def test_the_list_is_complete() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in files if "torch" in (text := path.read_text()) for name in private_names(text)}
    assert used == TABLE["names"].keys()


@pytest.mark.parametrize("name", TABLE["names"])
def test_torch_has_it(name: str) -> None:
    if ".mkldnn." in name and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    owner, _, member = name.rpartition(".")
    if name in MEMBERS.values():
        made = torch.zeros(1).untyped_storage() if member == "_cdata" else torch.nn.Module()
        assert isinstance(made, found(owner))  # type: ignore[arg-type]
        assert hasattr(made, member)
        return
    assert found(name) is not None, f"torch {torch.__version__} has no {name}; tried: {TABLE['versions tried']}"


def test_private_names_are_found() -> None:
    source = "import torch\nfrom torch.a._b import c\ntorch.ops._x(1)\nself._own\ns._cdata\ntorch.__version__\n"
    source += "import torch.d as e\nfrom torch import f\ne._g(f._h)\nself._buffers"
    expected = {"torch.a._b.c", "torch.ops._x", "torch.d._g", "torch.f._h", MEMBERS["_cdata"]}
    assert {*private_names(source)} == expected
