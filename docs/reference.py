"""Writes docs/cli.md from the commands' help texts and docs/api.md from docstrings: python docs/reference.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

FOLDER = Path(__file__).parent

_CLI = """# Command line

<!-- Made from the help texts by `python docs/reference.py`. Do not edit. -->

`platform-launch` checks, plans, rehearses and runs a config. `rl-platform` has the tools around runs. Exit codes are in
[Getting started](getting-started.md#when-something-is-wrong).

"""

_API = """# API

<!-- Made from the docstrings by `python docs/reference.py`. Do not edit. -->

These are the names of `import rl_platform as rl`. [Python](python.md) shows how the calls work together.

"""


def command_line() -> str:
    """Returns docs/cli.md: a section per command, with usage, arguments and options."""
    from rl_platform.launch import command
    from rl_platform.launch.tools import verbs

    parts = []
    for name, app in (("platform-launch", command.app), ("rl-platform", verbs.app)):
        click = get_command(app)
        text = get_docs_for_click(obj=click, ctx=typer.Context(click), name=name, indent=1)
        for verb, inner in getattr(click, "commands", {}).items():  # the list of verbs has the whole first line of each
            line = (inner.help or "").partition("\n")[0]
            text = re.sub(rf"^\* `{verb}`: .*$", lambda _, at=f"* `{verb}`: {line}": at, text, flags=re.MULTILINE)
        parts.append(text)
    lines = (line.rstrip() for line in "\n".join(parts).splitlines())
    return _CLI + "\n".join(lines).strip() + "\n"


def api() -> str:
    """Returns docs/api.md: a section per name of the package; of a module its public classes."""
    import rl_platform

    return _API + "\n".join(part for name in rl_platform.__all__ for part in _described(f"rl.{name}", rl_platform, 2))


def _described(path: str, owner: Any, level: int) -> list[str]:
    value = inspect.getattr_static(owner, path.rpartition(".")[2], None) or getattr(owner, path.rpartition(".")[2])
    value = getattr(value, "__func__", value)
    parts = ["#" * level + f" `{path}`", ""]
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if inspect.isfunction(value) or (inspect.isclass(value) and not is_error and value.__init__ is not object.__init__):
        parts += ["```python", f"{path}{_signature(value)}", "```", ""]
    if doc := _doc(value):
        parts += [doc, ""]
    if isinstance(value, ModuleType):
        here = {name: item for name, item in vars(value).items() if getattr(item, "__module__", "") == value.__name__}
        own = [name for name, item in here.items() if inspect.isclass(item)]
        parts += [part for name in own if _is_public(name) for part in _described(f"{path}.{name}", value, level + 1)]
    elif inspect.isclass(value) and not is_error:
        own = [name for name, item in vars(value).items() if callable(item) or isinstance(item, property | classmethod)]
        own += [name for name, item in vars(value).items() if type(item).__name__ == "cached_property"]
        parts += [part for name in own if _is_public(name) for part in _described(f"{path}.{name}", value, level + 1)]
    return parts


def _signature(value: Any) -> str:
    """One line, or one argument a line where that is too long; without `self` and the quotes of annotations."""
    signature = inspect.signature(value)
    own = [item for name, item in signature.parameters.items() if name != "self"]
    text = re.sub(r"(?<=: |> )'([^']*)'", r"\1", str(signature.replace(parameters=own)))
    if len(text) <= 90:
        return text
    arguments, _, result = text[1:].rpartition(") -> ")
    return "(\n    " + re.sub(r", (?=\*|\w+:)", ",\n    ", arguments) + f",\n) -> {result}"


def _doc(value: Any) -> str:
    """The docstring; not the one that a class inherits, nor a dataclass's signature."""
    doc = inspect.cleandoc(value.__doc__ or "") if not inspect.isclass(value) or "__doc__" in vars(value) else ""
    return "" if doc.startswith(f"{getattr(value, '__name__', '')}(") else doc


def _is_public(name: str) -> bool:
    return not name.startswith("_")


PAGES = {"cli.md": command_line, "api.md": api}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
