"""Functions of the user, named in a config as module:function. What they take and give is the caller's affair."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rl_platform.errors import ConfigError, Problem


def load_function(key: str, name: str, signature: str) -> Callable[..., Any]:
    """The function behind `name`, looked for in the folder of the start as well.

    Raises ConfigError about `key` if it cannot be imported or is none; `signature` says what it should be.
    """
    module_name, _, function_name = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a console script does not look where it was started
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        message = f"cannot be imported: {type(error).__name__}: {error}"
        raise misfit(key, name, message, "module:function, importable from where the run was started") from error
    if not callable(function):
        raise misfit(key, name, "is not a function", signature)
    return function


def misfit(key: str, name: str, message: str, allowed: str, hint: str = "") -> ConfigError:
    """The error about a function that cannot stand where `key` names it."""
    return ConfigError([Problem(key, message, value=name, allowed=allowed, hint=hint)])
