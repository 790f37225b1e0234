"""Modules of the user, named in a config: functions as module:function, environments as module:id.

The caller specifies arguments and result of a function.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rl_platform.errors import ConfigError, Problem


def import_user_module(name: str) -> ModuleType:
    """Imports an installed module or one of the working folder. Raises the errors of the import."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # sys.path of a console script starts with the script's own folder
    return importlib.import_module(name)


def load_function(key: str, name: str, signature: str) -> Callable[..., Any]:
    """The function behind `name`, from the installed modules or the working folder.

    Raises ConfigError about `key` if it cannot be imported or is no function; the message shows `signature`.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function: Callable[..., Any] = getattr(import_user_module(module_name), function_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        message = f"cannot be imported: {type(error).__name__}: {error}"
        raise misfit(key, name, message, "module:function, importable from where the run was started") from error
    if not callable(function):
        raise misfit(key, name, "is not a function", signature)
    return function


def misfit(key: str, name: str, message: str, allowed: str, hint: str = "") -> ConfigError:
    """The error about a function that does not fit `key`."""
    return ConfigError([Problem(key, message, value=name, allowed=allowed, hint=hint)])
