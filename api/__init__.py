"""The Python API: `import rl_platform as rl`, then `rl.train(...)`. `docs/python.md` shows every call.

A name is imported when it is first used, so that importing the package costs a millisecond. Importing changes nothing
in the process.
"""

from __future__ import annotations

import os.path
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers read these lines; the table below holds the same names
    from rl_platform import errors as errors
    from rl_platform.launch.policy import Policy as Policy
    from rl_platform.launch.policy import load_policy as load_policy

_MODULES = {  # name -> the module that defines it, or the module of that name
    "errors": "rl_platform.errors",
    "Policy": "rl_platform.launch.policy",
    "load_policy": "rl_platform.launch.policy",
}
__all__ = sorted(_MODULES)

_folder = os.path.dirname(os.path.abspath(__file__))
if os.path.basename(_folder) == "api":  # a checkout; a wheel holds the modules of `platform/` beside this file
    __path__.append(os.path.join(os.path.dirname(_folder), "platform"))

if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_MODULES[name])
        value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
