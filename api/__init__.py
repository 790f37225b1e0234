"""The Python API: `import rl_platform as rl`, then `rl.train(...)`. `docs/python.md` shows every call.

A name is imported when it is first used, so that importing the package costs a millisecond. Importing changes nothing
in the process.
"""

from __future__ import annotations

import os.path
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers read these lines; the table below holds the same names
    from rl_platform import callbacks as callbacks
    from rl_platform import errors as errors
    from rl_platform.launch.saved.loaded_policy import Policy as Policy
    from rl_platform.launch.saved.loaded_policy import load_policy as load_policy
    from rl_platform.python.inspection import Plan as Plan
    from rl_platform.python.inspection import check as check
    from rl_platform.python.inspection import evaluate as evaluate
    from rl_platform.python.inspection import plan as plan
    from rl_platform.python.runs import Metrics as Metrics
    from rl_platform.python.runs import Run as Run
    from rl_platform.python.runs import load_run as load_run
    from rl_platform.python.train_calls import ppo as ppo
    from rl_platform.python.train_calls import train as train

_MODULES = {  # name -> the module that defines it, or the module of that name
    "callbacks": "rl_platform.callbacks",
    "errors": "rl_platform.errors",
    "Policy": "rl_platform.launch.saved.loaded_policy",
    "load_policy": "rl_platform.launch.saved.loaded_policy",
    "Plan": "rl_platform.python.inspection",
    "check": "rl_platform.python.inspection",
    "evaluate": "rl_platform.python.inspection",
    "plan": "rl_platform.python.inspection",
    "Metrics": "rl_platform.python.runs",
    "Run": "rl_platform.python.runs",
    "load_run": "rl_platform.python.runs",
    "ppo": "rl_platform.python.train_calls",
    "train": "rl_platform.python.train_calls",
}
__all__ = sorted(_MODULES)

_folder = os.path.dirname(os.path.abspath(__file__))
if os.path.basename(_folder) == "api":  # a checkout; a wheel holds the modules of `platform/` beside this file
    __path__.append(os.path.join(os.path.dirname(_folder), "platform"))

if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])  # from them Python suggests a name
        module = import_module(_MODULES[name])
        value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
