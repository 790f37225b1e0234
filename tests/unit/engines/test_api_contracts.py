"""The installed SGLang, vLLM and Megatron have the functions that this project calls, with the parameters it passes.

The calls are read from the sources. `api_contracts.yaml` holds the signatures of short functions and the leading
parameters of long ones, so that a new order or another default is seen too.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang_engine import ENGINE_ENV, needs_sglang
from vllm_engine import VLLM_PYTHON, needs_vllm

TABLE = Path(__file__).parent / "api_contracts.yaml"
ENGINES = Path(__file__).parents[3] / "platform" / "engines"
SCRIPT = Path(__file__).parents[2] / "signatures.py"
SHORT = 12  # parameters; of longer signatures the table has what is passed by position
MESSAGES, MANAGER = "sglang.srt.managers.io_struct", "sglang.srt.managers.tokenizer_manager.TokenizerManager"
# What expressions of the sources are, beside imported names.
SGLANG = {"messages": MESSAGES, "self.manager": MANAGER, "self.engine": "sglang.Engine"}
VLLM = {"self.engine": "vllm.LLMEngine"}


@dataclass(frozen=True)
class Call:
    where: str
    name: str
    positional: int
    keywords: frozenset[str]
    open: bool  # has * or **


def calls(folder: Path, library: str, known: dict[str, str]) -> Iterator[Call]:
    """Yields the calls of a library's functions in the sources of a folder."""
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = dict(known)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            elif isinstance(node, ast.Import):
                own = [one for one in node.names if one.name.split(".")[0] == library]
                names |= {one.asname or library: one.name if one.asname else library for one in own}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node.func)
            base = next((base for base in names if text == base or text.startswith(f"{base}.")), None)
            if base is None:
                continue
            name = names[base] + text.removeprefix(base)
            keywords = frozenset(one.arg for one in node.keywords if one.arg)
            spread = any(isinstance(one, ast.Starred) for one in node.args) or any(not one.arg for one in node.keywords)
            yield Call(f"{path.name}:{node.lineno}", name, len(node.args), keywords, spread)


def installed(python: str, names: set[str], environment: dict[str, str]) -> dict[str, Any]:
    command = [python, "-W", "ignore", str(SCRIPT), *sorted(names)]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    signatures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return signatures


def problems_of(call: Call, signature: list[list[Any]] | None) -> list[str]:
    if signature is None:
        return [f"{call.where}: {call.name} does not exist"]
    ordered = [name for name, kind, _ in signature if kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")]
    by_name = {name for name, kind, _ in signature if kind in ("KEYWORD_ONLY", "POSITIONAL_OR_KEYWORD")}
    kinds = {kind for _, kind, _ in signature}
    found = []
    if call.positional > len(ordered) and "VAR_POSITIONAL" not in kinds:
        found.append(f"{call.where}: {call.name} takes {len(ordered)} arguments by position, {call.positional} given")
    if "VAR_KEYWORD" not in kinds:
        found += [f"{call.where}: {call.name} has no parameter {name}" for name in sorted(call.keywords - by_name)]
    given = {*ordered[: call.positional], *call.keywords}
    needed = [name for name, kind, default in signature if default is None and not kind.startswith("VAR_")]
    if not call.open:
        found += [f"{call.where}: {call.name} needs {name}" for name in needed if name not in given]
    return found


def written(signature: list[list[Any]], positional: int) -> list[str]:
    """The signature as the table has it."""
    rows = signature if len(signature) <= SHORT else signature[:positional]
    return [name if default is None else f"{name}={default}" for name, _, default in rows]


def check(library: str, found: list[Call], signatures: dict[str, Any]) -> None:
    problems = [line for call in found for line in problems_of(call, signatures[call.name])]
    positional = {name: max(call.positional for call in found if call.name == name) for name in signatures}
    now = {name: written(rows, positional[name]) for name, rows in sorted(signatures.items()) if rows is not None}
    table = yaml.safe_load(TABLE.read_text())[library]
    problems += [
        f"{name}: {now.get(name)} installed, {table.get(name)} in {TABLE.name}; adapt the calls, then the table"
        for name in sorted(now.keys() | table.keys())
        if now.get(name) != table.get(name)
    ]
    assert not problems, "\n".join([*problems, "all signatures:", yaml.safe_dump({library: now}, width=110)])


@needs_sglang
def test_sglang_signatures() -> None:
    found = [*calls(ENGINES / "rollout" / "sglang", "sglang", SGLANG)]
    found.append(Call("engine_arguments", "sglang.srt.server_args.ServerArgs", 0, sglang_arguments(), open=False))
    check("sglang", found, installed(sys.executable, {call.name for call in found}, ENGINE_ENV))


def sglang_arguments() -> frozenset[str]:
    from rl_platform.engines.rollout.sglang.program import EngineSetup, engine_arguments

    shapes = [EngineSetup({}, device, 1, "float32", 16, None, 0.3, 0, ()) for device in ("cpu", "cuda")]
    return frozenset(name for setup in shapes for name in engine_arguments(setup))


@needs_vllm
def test_vllm_signatures() -> None:
    found = [*calls(ENGINES / "rollout" / "vllm", "vllm", VLLM)]
    check("vllm", found, installed(VLLM_PYTHON, {call.name for call in found}, {}))


def test_megatron_signatures() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = [*calls(ENGINES / "training" / "megatron", "megatron", {})]
    check("megatron", found, installed(sys.executable, {call.name for call in found}, {}))


def test_differences_are_found() -> None:
    rows = [["a", "POSITIONAL_OR_KEYWORD", None], ["b", "KEYWORD_ONLY", "1"]]
    assert problems_of(Call("x.py:1", "f", 1, frozenset({"b"}), open=False), rows) == []
    lines = problems_of(Call("x.py:1", "f", 0, frozenset({"c"}), open=False), rows)
    assert lines == ["x.py:1: f has no parameter c", "x.py:1: f needs a"]
    assert problems_of(Call("x.py:1", "f", 2, frozenset(), open=False), rows) == [
        "x.py:1: f takes 1 arguments by position, 2 given"
    ]
    assert problems_of(Call("x.py:1", "f", 0, frozenset(), open=True), None) == ["x.py:1: f does not exist"]
