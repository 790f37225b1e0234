"""`env.python`: environments in another interpreter than the platform's, with its own packages.

The other interpreter needs numpy, gymnasium and the simulator. It imports the modules of this installation that step
environments, and none of their dependencies. Actions and results are in shared memory, as for every worker process.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import rl_platform.envs
from rl_platform.disk import cache_folder
from rl_platform.envs.embodied.build_problems.simulator_packages import MANIPULATION, simulator_of
from rl_platform.errors import ConfigError, Problem
from rl_platform.runtime.child import Child, Death
from rl_platform.suggest import nearest
from rl_platform.user_code import files_behind, import_user_module

if TYPE_CHECKING:
    from rl_platform.envs.embodied.descriptions import EnvDescription
    from rl_platform.envs.embodied.env_facts import EnvFacts

OLDEST = (3, 11)
INSPECTION_TIMEOUT_S = 120.0
KEY = "env.python"
# Packages without their own code: `rl_platform` is in two folders, which an editable install finds by a hook.
_PACKAGES = """
import sys, types
if sys.version_info < OLDEST:
    sys.exit("Python %d.%d or later is needed, this is %d.%d" % (*OLDEST, *sys.version_info[:2]))
for name, folders in FOLDERS.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = folders
sys.modules["rl_platform"].envs = sys.modules["rl_platform.envs"]
"""
_INSPECT = "import numpy, gymnasium; from rl_platform.envs.embodied.processes.interpreter import answer; answer()"
Inspection = tuple["EnvFacts | None", list[Problem], str]  # facts or None, problems, the traceback of another error
_known: dict[bytes, EnvFacts] = {}  # by pickled description


def environments_folder() -> Path:
    """Returns the folder of the virtual environments that `rl-platform environment` makes."""
    return cache_folder() / "environments"


def _names() -> set[str]:
    """Returns the names of the environments of this machine, and of the one that a command makes."""
    return {each.parents[1].name for each in environments_folder().glob("*/bin/python")} | {MANIPULATION}


def meant(name: str) -> str | None:
    """Returns the environment whose name is nearly `name`. None: there is none, or `name` is its name or a path."""
    return None if os.sep in name else nearest(name, _names() - {name})


def executable(name: str, simulates: str = "") -> str:
    """Returns the path of an interpreter: `name` itself, or that of the virtual environment with this name.

    simulates: the id or backend that it is for, whose packages the error names. Raises ConfigError if there is none.
    """
    if os.sep in name:
        if shutil.which(name) is None:
            wanted = simulator_of(simulates)
            hint = "as path/to/venv/bin/python" if wanted is None else wanted.install_line(name)
            raise ConfigError([Problem(KEY, "no such interpreter", value=name, hint=hint)])
        return os.path.abspath(name)  # not its target: a link in a virtual environment makes it that environment's
    path = environments_folder() / name / "bin" / "python"
    if not path.exists():
        folder = path.parents[2]
        if name == MANIPULATION:
            hint = f"`rl-platform environment {MANIPULATION}` makes it, in some minutes and with 1.5 GB"
            raise ConfigError([Problem(KEY, f"this environment is not made yet in {folder}", value=name, hint=hint)])
        made = _names()
        hint = f"`rl-platform environment {MANIPULATION}` makes {MANIPULATION}; or a path, as path/to/venv/bin/python"
        if near := meant(name):
            hint = f"did you mean {near}? {KEY}={near}"
        message = f"there is no environment of this name in {folder}"
        raise ConfigError([Problem(KEY, message, value=name, allowed=", ".join(sorted(made)), hint=hint)])
    return str(path)


def interpreter_code(code: str) -> str:
    """Returns code that makes the modules of this installation importable, then runs `code`."""
    folders = {name: list(sys.modules[name].__path__) for name in ("rl_platform", rl_platform.envs.__name__)}
    return f"OLDEST, FOLDERS = {OLDEST}, {json.dumps(folders)}\n{_PACKAGES}{code}"


def inspect_in_interpreter(description: EnvDescription) -> EnvFacts:
    """Returns the facts of the environment, built once in its interpreter. Raises ConfigError as `inspect_env` does."""
    assert description.python is not None
    name, key = description.python, pickle.dumps(description)
    if key not in _known:
        (inspection,) = _inspections([description])
        facts, problems, failure = inspection
        if problems:
            raise ConfigError(problems)
        if facts is None:
            raise ConfigError([Problem("env.id", f"cannot be built by {name}:\n{failure}", value=description.id)])
        _known[key] = facts
    return _known[key]


def inspect_tasks_in_interpreter(description: EnvDescription) -> None:
    """Builds all tasks one after the other in one process, so that `inspect_in_interpreter` starts none for them.

    A task that cannot be built ends this; `inspect_in_interpreter` of that task raises its error.
    """
    tasks = [description.of_task(number) for number in range(len(description.tasks))]
    unknown = [each for each in tasks if pickle.dumps(each) not in _known]
    if not unknown:
        return
    with suppress(ConfigError), closing(_inspections(unknown)) as inspections:
        for each, (facts, _, _) in zip(unknown, inspections, strict=True):
            if facts is None:
                return
            _known[pickle.dumps(each)] = facts


def _inspections(descriptions: Sequence[EnvDescription]) -> Generator[Inspection, None, None]:
    """Yields what one process of the first one's interpreter finds of each; it ends with the iterator.

    Raises ConfigError if it cannot run, or if one environment takes too long.
    """
    name = str(descriptions[0].python)
    with tempfile.TemporaryFile() as output:
        python = executable(name, descriptions[0].id)
        child = Child(interpreter_code(_INSPECT), Death.HANG_UP, output=output, python=python)
        connection = child.connection()
        try:
            here = [replace(description, python=None) for description in descriptions]
            connection.send_bytes(pickle.dumps((files_behind(pickle.dumps(here)), here)))
            for description in descriptions:
                if not connection.poll(INSPECTION_TIMEOUT_S):
                    message = f"{description.id} was not built within {INSPECTION_TIMEOUT_S:g} s"
                    hint = "a simulator may download or compile at its first use: start again, it continues there"
                    raise ConfigError([Problem(KEY, message, value=name, hint=hint)])
                yield pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            output.seek(0)
            raise ConfigError([_unusable(name, output.read().decode(errors="replace"), child)]) from error
        finally:
            connection.close()
            child.kill()


def _unusable(name: str, output: str, child: Child) -> Problem:
    """Returns the problem of an interpreter that ended without an answer."""
    last = output.strip().rpartition("\n")[2] or child.exit_reason()
    missing = "No module named" in last
    hint = f"{executable(name)} -m pip install numpy gymnasium" if missing else ""
    return Problem(KEY, f"cannot run environments: {last}", value=name, hint=hint)


def answer() -> None:
    """The code of `_inspections` in the other interpreter. Its argument: the descriptor of the connection."""
    from rl_platform.envs.embodied.env_facts import inspect_env

    connection = Connection(int(sys.argv[1]))
    del sys.argv[1:]  # an environment may parse the command line
    files, descriptions = pickle.loads(connection.recv_bytes())
    for description in descriptions:
        inspection: Inspection = None, [], ""
        try:
            for file in files:
                import_user_module(file)
            inspection = inspect_env(description), [], ""
        except ConfigError as error:
            inspection = None, list(error.problems), ""
        except Exception:
            inspection = None, [], traceback.format_exc()
        connection.send_bytes(pickle.dumps(inspection))
