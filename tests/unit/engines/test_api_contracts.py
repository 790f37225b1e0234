"""Every call into SGLang, vLLM and Megatron-Core fits the signatures of `tests/api_contracts.yaml`, and those of the
library where it is installed.

After a change of a library, `python tests/api_contracts.py LIBRARY FOLDER` writes the new signatures; the comparison
before that shows what to read.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_contracts import LIBRARIES, TABLE, Call, Installed, calls_of, calls_of_sources, differences, misfit, names_of
from sglang_engine import needs_sglang
from vllm_engine import VLLM_PYTHON, needs_vllm

TABLES: dict[str, Any] = yaml.safe_load(TABLE.read_text())
SGLANG = "platform/engines/rollout/sglang/program.py"


@cache
def calls() -> list[Call]:
    """Reads all sources, which takes a second: not when each process collects the tests."""
    return calls_of_sources(TABLES)


def installed(library: str) -> Installed:
    if library == "vllm":
        (folder,) = (Path(VLLM_PYTHON).parents[1] / "lib").glob("python*/site-packages")
        return Installed(folder, TABLES)
    found = importlib.util.find_spec(library)
    assert found is not None
    assert found.submodule_search_locations is not None
    return Installed(Path(next(iter(found.submodule_search_locations))).parent, TABLES)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_table_has_what_is_called_and_no_more(library: str) -> None:
    assert names_of(calls(), library) == sorted(TABLES["libraries"][library]["signatures"])


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_call_fits_its_signature(library: str) -> None:
    signatures = TABLES["libraries"][library]["signatures"]
    own = [call for call in calls() if call.name in signatures]
    assert [problem for call in own if (problem := misfit(call, signatures[call.name]))] == []


@pytest.mark.parametrize(
    "library", ["megatron", pytest.param("sglang", marks=needs_sglang), pytest.param("vllm", marks=needs_vllm)]
)
def test_the_installed_library_has_these_signatures(library: str) -> None:
    table, found = TABLES["libraries"][library], installed(library)
    changed = differences(table["signatures"], {name: found.signature(name, calls()) for name in table["signatures"]})
    assert not changed, "\n".join(
        [f"{library} {found.version(library)} differs from {table['version']}, which was tried:", *changed]
    )


@pytest.fixture
def planted(tmp_path: Path) -> Installed:
    """A library of this name whose calls differ from those of the table."""
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .tools import scale, Options\nfrom .tools import scale as tools\n")
    (package / "tools.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Base:\n    first: int\n    second: int = 2\n"
        "@dataclass\n"
        "class Options(Base):\n    third: str = 'c'\n"
        "class Tool:\n    def __init__(self, size): ...\n    def use(self, a, *, b=1): ...\n"
        "class Own(Tool):\n    @staticmethod\n    def make(c): ...\n"
        "def scale(tensor, factor=1.0): ...\n"
    )
    return Installed(tmp_path, TABLES)


def test_signatures_are_read_through_imports_and_bases(planted: Installed) -> None:
    names = ["core.scale", "core.tools", "core.Options", "core.tools.Own", "core.tools.Own.use", "core.tools.Own.make"]
    assert [planted.signature(f"megatron.{name}") for name in names] == [
        "tensor, factor=1.0",
        "tensor, factor=1.0",
        "first, second=2, third='c'",
        "size",
        "a, *, b=1",
        "c",
    ]
    assert planted.signature("megatron.core.gone") is None


def test_what_changed_in_a_library_is_named(planted: Installed) -> None:
    stored = {
        "megatron.core.scale": "tensor, factor=1.0",  # as it is
        "megatron.core.tools.Tool": "size, kind=None",  # a parameter less
        "megatron.core.Options": "second=2, first, third='c'",  # another order
        "megatron.core.tools.Own.use": "a, *, b=2",  # another default
        "megatron.core.old": "",
    }
    found = {name: planted.signature(name) for name in stored}
    assert differences(stored, found) == [
        "megatron.core.tools.Tool: (size, kind=None) is now (size)",
        "megatron.core.Options: (second=2, first, third='c') is now (first, second=2, third='c')",
        "megatron.core.tools.Own.use: (a, *, b=2) is now (a, *, b=1)",
        "megatron.core.old: () is now gone",
    ]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("core.scale(x)", None),
        ("core.scale(x, factor=2)", None),
        ("core.scale(*rows)", None),
        ("core.scale(x, **more)", None),
        ("core.scale()", "missing a required argument: 'tensor'"),
        ("core.scale(x, 1, 2)", "too many positional arguments"),
        ("core.scale(x, by=2)", "got an unexpected keyword argument 'by'"),
        ("core.scale(*rows, by=2)", "got an unexpected keyword argument 'by'"),
    ],
)
def test_a_call_that_does_not_fit_is_found(call: str, problem: str | None) -> None:
    source = f"def run():\n    from megatron import core\n    return {call}\n"
    (found,) = [one for one in calls_of(source, "here.py", TABLES) if one.name == "megatron.core.scale"]
    told = misfit(found, "tensor, factor=1.0")
    assert told == (problem and f"here.py:3: megatron.core.scale(tensor, factor=1.0): {problem}")


def test_methods_of_named_objects_overridden_ones_and_dictionaries_are_calls() -> None:
    source = (
        "from sglang.srt import model\n"
        "class Own(model.Base):\n    def forward(self): ...\n"
        "def engine_arguments(): return {'tp_size': 1} | {'dtype': 'half'}\n"
        "async def run(self): await self.manager.flush_cache(3, wait=True)\n"
    )
    found = {(one.name, one.positional, one.named) for one in calls_of(source, SGLANG, TABLES)}
    assert found == {
        ("sglang.srt.model", 0, ()),
        ("sglang.srt.model.Base", 0, ()),
        ("sglang.srt.model.Base.forward", 0, ()),
        ("sglang.srt.server_args.ServerArgs", 0, ("dtype", "tp_size")),
        ("sglang.srt.managers.tokenizer_manager.TokenizerManager.flush_cache", 1, ("wait",)),
    }
