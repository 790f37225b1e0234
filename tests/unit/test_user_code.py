"""Code of the user: how it is named, imported and compared with its protocol."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from rl_platform.errors import ConfigError
from rl_platform.user_code import Extension, files_behind, import_user_module, is_named, raised_at


class Scale(Protocol):
    def __call__(self, number: float, factor: float, /) -> float: ...


class Machine(Protocol):
    def __init__(self, size: int, **options: object) -> None: ...

    def start(self, speed: float, *, slowly: bool) -> None: ...

    def stop(self) -> None: ...


FUNCTION = Extension("scale", "part.scale", Scale, "function(number, factor) -> float")
CLASS = Extension("machine", "part.machine", Machine, "class with start and stop")
SOURCE = """
def scale(a, b): return a * b
def scale_more(a, b, c=1): return a * b * c
def short(a): return a
def long(a, b, c): return a
class Scaling:
    def __call__(self, number, factor): return number * factor
class Needy:
    def __init__(self, name): ...
    def __call__(self, number, factor): ...
number = 3
class Good:
    def __init__(self, size, colour="red"): ...
    def start(self, speed, *, slowly): ...
    @staticmethod
    def stop(): ...
class NoStop:
    def __init__(self, size): ...
    def start(self, speed, *, slowly): ...
class WrongStart(NoStop):
    def start(self, speed): ...
    def stop(self): ...
class WrongInit(Good):
    def __init__(self): ...
async def later(a, b): return a
def one_by_one(a, b): yield a
class LaterScaling:
    async def __call__(self, number, factor): ...
class LaterStart(Good):
    async def start(self, speed, *, slowly): ...
class Exits:
    def __init__(self): raise SystemExit("usage")
    def __call__(self, number, factor): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "users-code.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize("name", ["scale", "scale_more", "Scaling"])
def test_functions_that_fit(file: str, name: str) -> None:
    assert FUNCTION.load(f"{file}:{name}")(2, 3) == 6


def test_a_class_that_fits(file: str) -> None:
    assert CLASS.load(f"{file}:Good", ["colour"]).__name__ == "Good"


def test_an_option_that_the_constructor_does_not_take(file: str) -> None:
    with pytest.raises(ConfigError, match=r"called with \(size, color\): got an unexpected keyword argument 'color'"):
        CLASS.load(f"{file}:Good", ["color"])


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (FUNCTION, "nothing", "cannot be imported: AttributeError"),
        (FUNCTION, "number", "is not a function"),
        (FUNCTION, "short", "it is called with (number, factor): too many positional arguments"),
        (FUNCTION, "long", "it is called with (number, factor): missing a required argument: 'c'"),
        (FUNCTION, "Needy", "cannot be built: TypeError"),
        (FUNCTION, "Exits", "cannot be built: SystemExit at "),
        (FUNCTION, "later", "it is an async function: a call returns no result"),
        (FUNCTION, "one_by_one", "it is a generator function, because it contains yield: a call returns no result"),
        (FUNCTION, "LaterScaling", "it is an async function"),
        (CLASS, "LaterStart", "start() is an async function"),
        (CLASS, "scale", "is not a class"),
        (CLASS, "NoStop", "has no method stop"),
        (CLASS, "WrongStart", "start() is called with (speed, slowly): got an unexpected keyword argument 'slowly'"),
        (CLASS, "WrongInit", "its constructor is called with (size): too many positional arguments"),
    ],
)
def test_code_that_does_not_fit(file: str, kind: Extension, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as failed:
        kind.load(f"{file}:{name}")
    (problem,) = failed.value.problems
    assert (problem.key, problem.value) == (kind.key, f"{file}:{name}")
    assert problem.message.startswith(message)
    assert problem.allowed == (kind.usage if name != "nothing" else problem.allowed)


def test_a_package_that_the_code_imports_and_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import absent_package")
    with pytest.raises(ConfigError) as failed:
        FUNCTION.load(f"{tmp_path / 'own.py'}:own")
    assert failed.value.problems[0].hint == "the code imports absent_package, which is not installed here"
    with pytest.raises(ConfigError) as failed:
        FUNCTION.load("absent_package:own")
    assert not failed.value.problems[0].hint
    with pytest.raises(ConfigError) as failed:
        FUNCTION.load("absent.py:own")
    assert not failed.value.problems[0].hint


def test_kinds_of_code_that_are_awaited_may_be_async(file: str) -> None:
    assert replace(FUNCTION, awaits=True).load(f"{file}:later")


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("def scales(a, b): ...", "AttributeError: own.py has no attribute 'scale'", "did you mean scales?"),
        ("def f(a, b): ...\nfrom os import sep", "AttributeError: own.py has no", "it defines f"),
        ("x = 3", "AttributeError: own.py has no attribute 'scale'", "it defines nothing"),
        ("x = 3\nx.y", "AttributeError at own.py:2: 'int' object has no attribute 'y'", ""),
        ("def f():\n    return g\nf()", "NameError at own.py:2: name 'g' is not defined", ""),
        ("x = 3\ndef f() 3", "SyntaxError at own.py:2: expected ':'", ""),
        ("import sys\nsys.exit('usage: FILE')", "SystemExit at own.py:2: usage: FILE", "it is imported, not run as"),
    ],
)
def test_a_file_that_fails_names_its_line_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str, hint: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as failed:
        FUNCTION.load("own.py:scale")
    (problem,) = failed.value.problems
    assert problem.message.startswith("cannot be imported: " + message)
    assert problem.hint.startswith(hint)
    assert bool(problem.hint) == bool(hint)


def test_a_file_is_imported_once_and_finds_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper_beside.py").write_text("value = 5\n")
    (tmp_path / "main.py").write_text("from helper_beside import value\n")
    module = import_user_module(str(tmp_path / "main.py"))
    assert module.value == 5
    assert import_user_module(str(tmp_path / "main.py")) is module
    with pytest.raises(ModuleNotFoundError, match="there is no file"):
        import_user_module(str(tmp_path / "other.py"))


def test_the_path_of_a_file_may_begin_with_the_home_folder(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(file).parent))
    assert FUNCTION.load(f"~/{Path(file).name}:scale") is FUNCTION.load(f"{file}:scale")


def test_a_child_imports_the_files_that_its_pickle_needs_and_no_others(tmp_path: Path) -> None:
    for name in ("used.py", "other.py"):
        (tmp_path / name).write_text("class Thing: pass\n")
    used, _ = (import_user_module(str(tmp_path / name)) for name in ("used.py", "other.py"))
    (tmp_path / "other.py").unlink()
    assert files_behind(pickle.dumps(used.Thing())) == [str(tmp_path / "used.py")]
    assert files_behind(pickle.dumps(1)) == []


@pytest.mark.parametrize("name", ["a:b", "a.b_1:C", "folder/my-file.py:Name", "../x.py:y"])
def test_names(name: str) -> None:
    assert is_named(name)


@pytest.mark.parametrize("name", ["a", "a.py", "a-b:c", "a:b:c", "a:b.c", "x.py:y.z", ":a", "a:"])
def test_no_names(name: str) -> None:
    assert not is_named(name)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import json\ndef call():\n    json.loads('{')", 3),  # raised in the standard library
        ("import numpy\ndef call():\n    numpy.concatenate([])", 3),
        ("def call():\n    return inner()\ndef inner():\n    raise ValueError", 4),
        ("from rl_platform.errors import shown\ndef call():\n    raise ValueError(shown(1))", 3),
        ("def call():\n    import broken_module", 2),
    ],
)
def test_an_error_is_located_in_the_code_of_the_user(tmp_path, monkeypatch, code: str, line: int) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        import_user_module(str(tmp_path / "mine.py")).call()
    assert raised_at(raised.value) == f"mine.py:{line}"


def test_an_error_of_syntax_is_located_in_its_file(tmp_path: Path) -> None:
    (path := tmp_path / "typo.py").write_text("good = 1\ndef bad(:\n")
    with pytest.raises(SyntaxError) as raised:
        import_user_module(str(path))
    assert raised_at(raised.value) == f"{path}:2"


def test_an_error_of_a_library_is_located_at_its_call() -> None:
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("{")
    assert "test_user_code.py:" in raised_at(raised.value)
    assert raised_at(ValueError()) == ""
