"""Stored machine code counts only for unchanged sources, and a damaged file or a full disk costs a compilation."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_forks import Launcher

from rl_platform.accel import stored_code
from rl_platform.accel.stored_code import PACKAGE, SOURCES, sources_digest

CODE = """
import numpy as np
from rl_platform.accel.normalizing_loops import normalize_rows
out = np.empty((2, 3), np.float32)
normalize_rows()(np.ones((2, 3)), np.zeros(3), np.ones(3), 10.0, out)
assert abs(out - 1).max() < 1e-6
stats = normalize_rows().stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""
HOMELESS = """
from pathlib import Path
def home():
    raise RuntimeError("no home directory")
Path.home = home
"""
HIT, MISS = ("1", "0"), ("0", "1")


@pytest.fixture
def begin(start: Callable[..., Launcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Launcher]:
    """begin(): another process begins to compile a loop, with the cache `tmp_path`."""
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    return lambda: start(code=CODE)


def ended(process: Launcher) -> tuple[tuple[str, str], Path]:
    """Returns the hits and misses of a process, and the folder of machine code."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    hits, misses, folder = out.split()
    return (hits, misses), Path(folder)


def test_a_second_process_compiles_nothing(begin: Callable[[], Launcher], tmp_path: Path) -> None:
    first, folder = ended(begin())
    assert first == MISS
    assert folder.parent == tmp_path / "loops"
    assert ended(begin()) == (HIT, folder)


def test_damaged_machine_code_is_compiled_again(begin: Callable[[], Launcher]) -> None:
    (file,) = ended(begin())[1].iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        assert ended(begin())[0] == MISS
    assert ended(begin())[0] == HIT


def test_a_folder_that_takes_no_file_is_no_error(begin: Callable[[], Launcher], tmp_path: Path) -> None:
    (tmp_path / "loops").write_text("a file in the place of the folder, which root cannot write to either")
    assert ended(begin())[0] == MISS
    assert ended(begin())[0] == MISS


def test_without_a_home_folder_loops_are_compiled(
    start: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RL_PLATFORM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    process = start(code=HOMELESS + CODE.partition("stats =")[0])
    assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_processes_that_store_one_loop_at_once(begin: Callable[[], Launcher]) -> None:
    for process in [begin() for _ in range(3)]:
        ended(process)
    result, folder = ended(begin())
    assert result == HIT
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("folder", SOURCES)
def test_a_changed_source_is_another_digest(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOURCES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(stored_code, "PACKAGE", tmp_path)
    before = sources_digest.__wrapped__()
    (tmp_path / folder / "module.py").write_text("x = 2\n")
    assert sources_digest.__wrapped__() != before


def test_loops_take_functions_and_numbers_from_digested_folders_only() -> None:
    """Machine code contains numbers of other modules, so a change of such a module must change the digest."""
    for file in (PACKAGE / "accel").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "compiled_loops" not in text and "tensor_loops" not in text:
            continue
        for statement in ast.parse(text).body:  # not those under `if TYPE_CHECKING`
            if not isinstance(statement, ast.ImportFrom) or not str(statement.module).startswith("rl_platform."):
                continue
            if str(statement.module).split(".")[1] not in SOURCES:
                names = [each.name for each in statement.names]
                assert all(name[0].isupper() and not name.isupper() for name in names), (file.name, names)  # classes
