"""Writes docs/cli.md from the help texts of the commands: python docs/reference.py."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

CLI = Path(__file__).parent / "cli.md"

_HEAD = """# Command line

<!-- Made from the help texts by `python docs/reference.py`. Do not edit. -->

`platform-launch` checks, plans, rehearses and runs a config. `rl-platform` has the tools around runs. Exit codes are in
[Getting started](getting-started.md#when-something-is-wrong).

"""


def command_line() -> str:
    """Returns the page: a section per command, with usage, arguments and options."""
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
    return _HEAD + "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    CLI.write_text(command_line(), encoding="utf-8")
