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
CDATA = "torch.UntypedStorage._cdata"


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
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (name for one in node.names if is_private(name := f"{node.module}.{one.name}"))
        elif isinstance(node, ast.Attribute) and node.attr == "_cdata":
            yield CDATA
        elif isinstance(node, ast.Attribute) and is_private(name := ast.unparse(node)):
            yield name


def test_the_list_is_complete() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in files if "torch" in (text := path.read_text()) for name in private_names(text)}
    assert used == TABLE["names"].keys()


@pytest.mark.parametrize("name", TABLE["names"])
def test_torch_has_it(name: str) -> None:
    if ".mkldnn." in name and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    if name == CDATA:
        assert isinstance(torch.zeros(1).untyped_storage()._cdata, int)
        return
    assert found(name) is not None, f"torch {torch.__version__} has no {name}; tried: {TABLE['versions tried']}"


def test_private_names_are_found() -> None:
    source = "import torch\nfrom torch.a._b import c\ntorch.ops._x(1)\nself._own\ns._cdata\ntorch.__version__"
    assert {*private_names(source)} == {"torch.a._b.c", "torch.ops._x", CDATA}
