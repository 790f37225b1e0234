"""`rl-platform environment NAME`: a virtual environment for simulators that need other packages than the platform.

`env.python: NAME` steps environments with it. It is made once, in the cache, from exact versions that the package
lists. Afterwards it needs no network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files

from rl_platform.envs.embodied.build_problems.simulator_packages import named_simulator
from rl_platform.envs.embodied.processes.interpreter import environments_folder
from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.suggest import did_you_mean

COMPLETE = "versions.txt"  # the list that the environment was made from; written last
IMPORTS = "# imports: "


def names() -> list[str]:
    """Returns the environments that can be made."""
    entries = files(__package__).joinpath("simulators").iterdir()
    return sorted(entry.name.removesuffix(".txt") for entry in entries if entry.name.endswith(".txt"))


def is_made(name: str) -> bool:
    """Returns whether the environment exists as this version of the package lists it."""
    complete = environments_folder() / name / COMPLETE
    return complete.is_file() and complete.read_text(encoding="utf-8") == _versions(name)


def make(name: str) -> Iterator[str]:
    """Makes the environment unless it is there; yields messages for the user. Raises ConfigError for an unknown
    name, DataError if it cannot be made."""
    if name not in names():
        hint = did_you_mean(name, names())
        if known := named_simulator(name):
            hint = known.install_line()
        problem = Problem("NAME", "no such environment", value=name, allowed=", ".join(names()), hint=hint)
        raise ConfigError([problem])
    folder = environments_folder() / name
    if is_made(name):
        yield f"{folder} is complete; env.python={name} uses it"
        return
    yield f"{folder}: installing {', '.join(_imports(name))}; this takes a few minutes and some 1.5 GB"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        versions = folder.with_suffix(".txt")
        versions.write_text(_versions(name), encoding="utf-8")
        _run("make it", sys.executable, "-m", "venv", str(folder))
        python = str(folder / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run("install its packages", *pip, "--no-deps", "-r", str(versions))
        _run("import its packages", python, "-c", f"import {', '.join(_imports(name))}")
        versions.replace(folder / COMPLETE)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror or error}") from error
    yield f"done; env.python={name} uses it"


def _run(doing: str, *command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        lines = (ended.stderr or ended.stdout).strip().splitlines()
        raise DataError(f"cannot {doing}: {' '.join(lines[-3:]) or f'exit code {ended.returncode}'}")


def _versions(name: str) -> str:
    return files(__package__).joinpath("simulators", f"{name}.txt").read_text(encoding="utf-8")


def packages(name: str) -> list[str]:
    """Returns its simulators and MuJoCo with their versions, as `robosuite 1.5.2`."""
    lines = [line.split("==") for line in _versions(name).splitlines() if not line.startswith("#")]
    versions = {package.replace("-", "_"): version for package, version in lines}
    return [f"{each} {versions[each]}" for each in (*_imports(name), "mujoco") if each in versions]


def _imports(name: str) -> list[str]:
    """Returns the modules whose import shows that the environment is complete."""
    line = next(line for line in _versions(name).splitlines() if line.startswith(IMPORTS))
    return line.removeprefix(IMPORTS).split()
