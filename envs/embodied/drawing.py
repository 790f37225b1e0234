"""Drawing without a screen: which graphics library a worker process uses. A library that crashes ends only that."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from rl_platform.errors import PlatformError

# ways to draw without a screen, best first: the GPU's or Mesa's EGL, then software
_HEADLESS = ("egl", "osmesa")

Found = TypeVar("Found")


class CannotDraw(Exception):
    """No library worked; the message says what each of them said."""


def with_drawing(uses_mujoco: bool, start: Callable[[dict[str, str]], Found]) -> Found:
    """The result of `start`, given environment variables for its processes, with the first library that draws.

    MUJOCO_GL is respected where it is set. Raises CannotDraw.
    """
    notes = []
    for variables in _drawing_variables(uses_mujoco):
        try:
            return start(variables)
        except (PlatformError, ImportError, OSError, RuntimeError) as error:
            setting = ", ".join(f"{name}={value}" for name, value in variables.items() if name == "MUJOCO_GL")
            notes.append(f"{setting}: {_last_line(error)}" if setting else _last_line(error))
    raise CannotDraw("; ".join(notes))


def _drawing_variables(uses_mujoco: bool) -> list[dict[str, str]]:
    """Environment variables to try, in order, for drawing without a screen."""
    if not uses_mujoco:
        return [{"SDL_VIDEODRIVER": "dummy"}]  # classic control draws with pygame
    if "MUJOCO_GL" in os.environ:
        return [{"MUJOCO_GL": os.environ["MUJOCO_GL"]}]
    return [{"MUJOCO_GL": library, "PYOPENGL_PLATFORM": library} for library in _HEADLESS]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
