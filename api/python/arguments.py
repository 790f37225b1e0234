"""Arguments that several calls of the Python API share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike

from rl_platform.config.python_values import OVERRIDES
from rl_platform.errors import ConfigError, Problem

Source = str | PathLike[str] | Mapping[str, object]  # a YAML file, or its content as nested dicts


def as_source(config: object) -> Source:
    """Raises ConfigError for what is neither a path nor a dict."""
    if isinstance(config, str | PathLike | Mapping):
        return config
    allowed = "the path of a YAML file, or a dict"
    raise ConfigError([Problem("config", "is no config", value=repr(config)[:80], allowed=allowed)])


def as_overrides(overrides: object) -> Mapping[str, object]:
    """Returns the overrides; an empty dict for None. Raises ConfigError for a value that is no dict."""
    if overrides is None or isinstance(overrides, Mapping):
        return overrides or {}
    hint = 'overrides={"runner.seed": 2}'
    raise ConfigError([Problem(OVERRIDES, "is no dict", value=repr(overrides)[:80], allowed="a dict", hint=hint)])


def folder_of(run: object) -> str:
    """Returns the folder that a path or a run names. Raises ConfigError for anything else."""
    if isinstance(run, str | PathLike):
        return str(os.fspath(run))
    allowed = "a run, or the path of its folder"
    raise ConfigError([Problem("run", "names no folder", value=repr(run)[:80], allowed=allowed)])
