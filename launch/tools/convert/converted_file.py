"""`rl-platform convert`: reads, translates, checks and writes."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rl_platform.config.loader import load_config
from rl_platform.disk import check_unedited
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.convert.conversion import convert
from rl_platform.launch.tools.convert.converted_yaml import as_yaml, report
from rl_platform.launch.tools.convert.reading import read
from rl_platform.launch.tools.written import writing


def run(path: Path, name: str | None, output: Path | None, env: str | None) -> None:
    """Writes the translation of `path` to `output`, else to standard output, and prints the report.

    Without `output` the report goes to standard error. Raises ConfigError if the file is no config of a known system,
    if `output` exists with another content, or, after it has written, if the result breaks a rule of the schema.
    """
    foreign = read(path, name, env)
    done = convert(foreign.system, foreign.keys)
    text = as_yaml(done, path)
    problems = problems_of(text, "standard output" if output is None else str(output))
    if output is None:
        print(text, end="")
    else:
        try:
            check_unedited(output, text)
            with writing(output, (".yaml", ".yml")) as stage:
                stage.write_text(text, encoding="utf-8")
        except OSError as error:
            message, hint = f"cannot be written: {error.strerror}", "name another file, or remove it"
            raise ConfigError([Problem("--output", message, value=str(output), hint=hint)]) from error
    print("\n".join(report(done)), file=sys.stderr if output is None else sys.stdout)
    if problems:
        raise ConfigError(problems)
    if output is not None:
        print(f"{output}: passes the schema; next: platform-launch --plan {output}")


def problems_of(text: str, place: str) -> list[Problem]:
    """Returns the problems that the loader finds in a config; `place` names the file of their lines."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file)
        except ConfigError as error:
            return [replace(each, where=each.where.replace(str(file), place)) for each in error.problems]
    return []
