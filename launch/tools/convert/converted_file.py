"""`rl-platform convert`: reads, translates, checks and writes."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rl_platform.disk import check_unedited
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.placed_config import load, located
from rl_platform.launch.start_checks.sharding import check_layout
from rl_platform.launch.tools.convert.conversion import Conversion, convert
from rl_platform.launch.tools.convert.converted_yaml import as_yaml, report
from rl_platform.launch.tools.convert.reading import read
from rl_platform.launch.written import writing

_NAMES_CODE = ("env.id", "actor.model.type")


def run(path: Path, name: str | None, output: Path | None, env: str | None) -> None:
    """Writes the translation of `path` to `output`, else to standard output, and prints the report.

    Stand-ins for a simulator and a network are written beside `output`. Without `output` the report goes to standard
    error. Raises ConfigError if the file is no config of a known system, or if a file exists with another content. Also
    raises it after writing, if the schema or the models refuse the result.
    """
    foreign = read(path, name, env)
    done = convert(foreign.system, foreign.keys)
    files = {} if output is None else _files(done, output)
    text = as_yaml(done, path)
    problems = problems_of(text, "standard output" if output is None else str(output))
    if output is None:
        print(text, end="")
    else:
        _write(output, text, (".yaml", ".yml"))
        for file, (_, code) in files.items():
            if not os.path.lexists(file):
                _write(file, code, (".py",))
    print("\n".join(report(done)), file=sys.stderr if output is None else sys.stdout)
    for file, (defined, code) in files.items():
        if file.read_text(encoding="utf-8") == code:
            print(f"{file}: {defined} is a stand-in for rehearsals; put the real one there before you train")
        else:
            print(f"{file}: kept, because it defines {defined}; see whether its arguments and shapes fit")
    if problems:
        raise ConfigError(problems)
    if output is not None:
        print(f"{output}: passes the schema; next: platform-launch --plan {output}")


def _write(output: Path, text: str, endings: tuple[str, ...]) -> None:
    try:
        check_unedited(output, text)
        with writing(output, endings) as stage:
            stage.write_text(text, encoding="utf-8")
    except OSError as error:
        message, hint = f"cannot be written: {error.strerror}", "name another file, or remove it"
        raise ConfigError([Problem("--output", message, value=str(output), hint=hint)]) from error


def _files(done: Conversion, output: Path) -> dict[Path, tuple[str, str]]:
    """Returns the stand-ins beside `output`, which the config then names. Raises ConfigError for a file that lacks the
    name."""
    files, problems = {}, []
    for name, (defined, code) in done.stand_ins.items():
        file = output.parent / name
        if os.path.lexists(file) and defined not in _defined(file):
            hint = f"add {defined} to it, or name an --output in another folder"
            problems.append(Problem("--output", f"{file} exists and does not define {defined}", hint=hint))
        files[file] = defined, code
        for key in _NAMES_CODE:
            if done.values.get(key) == f"{name}:{defined}":
                done.values[key] = f"{file}:{defined}"
    if problems:
        raise ConfigError(problems)
    return files


def _defined(file: Path) -> set[str]:
    """Returns the names that a Python file defines or imports; none if it is not readable as one."""
    names: set[str] = set()
    with suppress(OSError, ValueError, SyntaxError):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def problems_of(text: str, place: str) -> list[Problem]:
    """Returns what a plan of this config refuses: keys, placement, models. `place` names the file of its lines."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            loaded, placement, _ = load(str(file), {})
            with located(loaded):
                check_layout(loaded.config, placement)
        except ConfigError as error:
            return [replace(each, where=each.where.replace(str(file), place)) for each in error.problems]
    return []
