"""The problem of an environment that cannot be built: its key, and the line to type.

Simulators raise exceptions of many types for arguments, packages, libraries and files that are missing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError

import gymnasium

from rl_platform.envs.embodied.build_problems.simulator_packages import Simulator, simulator_of
from rl_platform.envs.embodied.descriptions import OF_PROGRAM
from rl_platform.errors import ConfigError, Problem, message_of
from rl_platform.extras import required
from rl_platform.user_code import raised

_LIBRARY = re.compile(r"(lib[\w+-]+)\.so[.\d]*")
_DEBIAN = {  # packages of libraries that simulators load
    "libGL": "libgl1",
    "libEGL": "libegl1",
    "libOSMesa": "libosmesa6",
    "libOpenGL": "libopengl0",
    "libvulkan": "libvulkan1",
    "libglib-2": "libglib2.0-0",
}
_DRAWING = re.compile(r"\b(?i:egl|osmesa|opengl|glfw)|\bgl[A-Z]\w")  # parts of errors of libraries that draw
_FILE = re.compile(r"(?:No such file or directory|Error opening file|could not open)\W*([^'\"\n]*)", re.IGNORECASE)
_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
_TWICE = re.compile(r"\bmake\(\) got multiple values for (?:keyword )?argument '(\w+)'")  # of gymnasium.make
_KEYS = {"id": "env.id", "max_episode_steps": "env.max_episode_steps"}  # of arguments that the platform passes


def build_problem(name: str, env_id: str, kwargs: Mapping[str, object], error: BaseException) -> Problem:
    """Returns the problem. name: `env.id`, maybe with its module; env_id: as Gymnasium registers it; error: raised by
    `gymnasium.make` with `kwargs`. Raises ConfigError for an unknown task of Meta-World, with the nearest names."""
    if isinstance(error, gymnasium.error.DependencyNotInstalled):
        return Problem("env.id", "a package is missing", value=repr(name), hint=message_of(error))
    _check_task_of_metaworld(env_id, kwargs)
    message, text = f"{env_id} cannot be built ({raised(error)})", message_of(error)
    if env_id.startswith(OF_PROGRAM):
        hint = "the function takes env.kwargs and returns one Gymnasium environment; env.num_envs makes several"
        return Problem("env", message, value=name, hint=hint)
    if "must inherit from the gymnasium.Env class" in text:
        hint = "derive the class from gymnasium.Env"
        if "Vector" in text:
            hint = "name one environment, env.num_envs makes several"
        return Problem("env.id", message, value=name, hint=hint)
    if isinstance(error, TypeError) and (match := _TWICE.search(text)) and match[1] in kwargs:
        return _passed_by_platform(match[1], kwargs[match[1]])
    if (match := _ARGUMENT.search(text)) and match[1] in kwargs:
        return Problem("env.kwargs", message, value=repr(kwargs), hint=f"remove it: ~env.kwargs.{match[1]}")
    if (problem := machine_problem(message, error, simulator_of(name))) is not None:
        return problem
    hint = "check env.kwargs against the environment's documentation"
    if isinstance(error, ModuleNotFoundError) and error.name:  # code that raises it may give no name
        return Problem("env.id", message, value=env_id, hint=f"install the package that contains {error.name}")
    return Problem("env.kwargs", message, value=repr(kwargs), hint=hint)


def _passed_by_platform(argument: str, value: object) -> Problem:
    removed = f"~env.kwargs.{argument}"
    if (key := _KEYS.get(argument)) is None:
        message, hint = "the platform sets this argument of gymnasium.make", f"remove it: {removed}"
    else:
        message, hint = f"{key} sets this argument of gymnasium.make", f"{removed} {key}={value}"
    return Problem(f"env.kwargs.{argument}", message, value=repr(value), hint=hint)


def _check_task_of_metaworld(env_id: str, kwargs: Mapping[str, object]) -> None:
    tasks = getattr(sys.modules.get("metaworld"), "ALL_V3_ENVIRONMENTS", None)
    if tasks and env_id.startswith("Meta-World/") and "env_name" in kwargs:
        with required("rl_platform.envs.embodied.suites", "env.id"):
            from rl_platform.envs.embodied.suites.names import check_name
        check_name("env_name", kwargs["env_name"], tasks)


def machine_problem(message: str, error: BaseException, simulator: Simulator | None) -> Problem | None:
    """Returns the problem of an interpreter, library or file that a simulator lacks; None: another one."""
    text = f"{type(error).__name__}: {message_of(error)}"
    here = sys.executable
    if simulator is not None:
        try:
            others = simulator.other_versions()
        except PackageNotFoundError:
            return Problem("env.python", message, value=here, hint=simulator.install_line())
        if others and not (isinstance(error, ConfigError) or _DRAWING.search(text)):
            hint = f"{simulator.name} was not tried with {' and '.join(others)}: {simulator.install_line()}"
            return Problem("env.python", message, value=here, hint=hint)
    if library := _LIBRARY.search(text):
        package = _DEBIAN.get(library[1])
        hint = f"install {library[0]}" + (f", on Debian: `apt install {package}`" if package else "")
        return Problem("env.python", message, value=here, hint=hint)
    if _DRAWING.search(text):
        hint = "install a library that draws, on Debian: `apt install libegl1 libgl1`, or `apt install libosmesa6` and "
        return Problem("env.python", message, value=here, hint=f"{hint}MUJOCO_GL=osmesa")
    if isinstance(error, FileNotFoundError) or _FILE.search(text):
        packages = "" if simulator is None else simulator.packages.partition(" ")[0]
        hint = f"`{here} -m pip install --force-reinstall --no-deps {packages}`" if packages else ""
        return Problem("env.python", message, value=here, hint=hint and f"a file of the simulator is missing: {hint}")
    return None
