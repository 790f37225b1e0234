"""The problem of an unregistered environment: similar ids, or the missing package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

import gymnasium

from rl_platform.envs.embodied.build_problems.build_failure import machine_problem
from rl_platform.envs.embodied.build_problems.simulator_packages import SIMULATORS, simulator_of
from rl_platform.envs.embodied.descriptions import OF_PROGRAM
from rl_platform.errors import PlatformError, Problem
from rl_platform.user_code import raised


def find_problem(env_id: str, code: object, error: Exception) -> Problem | None:
    """Returns the problem of an id, `NAME` or `MODULE:NAME`; None: `error` has a message of its own.

    code: the module; None: it was not imported. error: raised while the environment was looked for.
    """
    module, _, name = env_id.rpartition(":")
    if isinstance(error, gymnasium.error.Error):
        return _unknown(env_id, module, name, code, error)
    if isinstance(error, PlatformError) and simulator_of(env_id) is None:
        return None
    return _import_problem(env_id, module, error)


def _unknown(env_id: str, module: str, name: str, code: object, error: Exception) -> Problem:
    near = similar_ids(name, list(gymnasium.registry))
    if code is not None:
        made = [each for each, value in vars(code).items() if callable(value)]
        near = difflib.get_close_matches(name, [*near, *made])
    register = f"write MODULE:{name} with the module whose import registers it"
    if name.startswith(OF_PROGRAM):
        register = (
            "a program made it by a function: pass that as env=... to rl.evaluate; rl.load_policy needs model/, "
            "which a finished run has"
        )
    full = [f"{module}:{each}" if module else each for each in near]
    hint = f"did you mean {', '.join(near)}? env.id={full[0]}" if near else register
    return Problem("env.id", f"no such environment ({error})", value=repr(env_id), hint=hint)


def _import_problem(name: str, module: str, error: Exception) -> Problem:
    """Returns the problem of an id whose module raised `error` while it was imported."""
    message = f"its module cannot be imported ({raised(error)})"
    if (problem := machine_problem(message, error, simulator_of(name))) is not None:
        return replace(problem, key="env.id", value=repr(name))
    hint = f"install the package of {module}, or start where it can be imported"
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    if not isinstance(error, ImportError):
        hint = f"correct {module}"
    elif absent is not None and absent.partition(".")[0] != module.partition(".")[0]:
        hint = f"the code imports {absent}, which is not installed here"
    if near := difflib.get_close_matches(module, SIMULATORS, 1):
        hint = f"did you mean {near[0]}? env.id={near[0]}{name.removeprefix(module)}"
    return Problem("env.id", message, value=repr(name), hint=hint)


def similar_ids(name: str, known: Sequence[str]) -> list[str]:
    """Returns at most three registered ids whose names are close in spelling, whatever their namespaces and
    versions."""
    by_name: dict[str, list[str]] = {}
    for each in known:
        by_name.setdefault(_bare(each), []).append(each)
    close = difflib.get_close_matches(_bare(name), by_name, n=3, cutoff=0.7)
    return [each for bare in close for each in difflib.get_close_matches(name, by_name[bare], n=3, cutoff=0)][:3]


def _bare(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id.rpartition("/")[2]).lower()
