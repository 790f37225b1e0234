"""The switch `runner.accelerate`, and the only module of the core that imports `accel/`.

The switch is an environment variable, so every process that a run starts inherits it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from rl_platform.environment_variables import changed_variables
from rl_platform.extras import is_present

VARIABLE = "RL_PLATFORM_ACCELERATE"


def accelerating(mode: str) -> AbstractContextManager[None]:
    """Applies `runner.accelerate` to this process and to processes that start within the block."""
    return changed_variables({VARIABLE: mode})


def enabled() -> bool:
    """Returns whether accelerated implementations are used in this process."""
    return _present() and os.environ.get(VARIABLE) != "off"


@cache
def _present() -> bool:
    return is_present("rl_platform.accel")


def find(name: str, *arguments: object, **options: object) -> Any:
    """Returns the result of the function `name` of `accel/build.py`: an accelerated implementation, or None.

    None means that acceleration is off, that the folder `accel/` was removed, or that the implementation does not cover
    the arguments. The caller then uses its plain implementation. A few functions change a model in place and always
    return None. Callers never resolve in an inner loop.
    """
    if not enabled():
        return None
    from rl_platform.accel import build

    return getattr(build, name)(*arguments, **options)
