"""Logs MuJoCo's warnings while it reads a model file, each deprecation once per run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_platform.envs.embodied.stepping import model_warnings

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

# Environment variable with the deprecations that this run has logged, one per line. MuJoCo 4 reports them for each
# model file that it reads, and child processes read the same files and inherit the variable.
_SHOWN_DEPRECATIONS = "RL_PLATFORM_SHOWN_DEPRECATIONS"
_USES_MUJOCO = ("gymnasium.envs.mujoco", "gymnasium_robotics", "metaworld")  # prefix of entry points
_warning_handler = threading.Lock()


@contextlib.contextmanager
def deprecations_once(spec: EnvSpec) -> Iterator[None]:
    """Logs each deprecation that MuJoCo reports once per run, and every other warning of MuJoCo."""
    entry_point = spec.entry_point
    origin = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    if "mujoco" not in sys.modules and not str(origin).startswith(_USES_MUJOCO):
        yield
        return
    try:
        import mujoco
    except ImportError:  # the error is reported when the environment is built
        yield
        return

    def handle(message: str) -> None:
        line = " ".join(message.split())
        shown = os.environ.get(_SHOWN_DEPRECATIONS, "").splitlines()
        if line in shown:
            return
        if "deprecated" in line:
            os.environ[_SHOWN_DEPRECATIONS] = "\n".join([*shown, line])
        model_warnings.warning("MuJoCo, model of %s: %s", spec.id, line)

    with _warning_handler:
        previous = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(handle)
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(previous)
