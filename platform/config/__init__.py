"""One closed schema for every run, and its loading from YAML with line numbers, overrides and references."""

from __future__ import annotations

from rl_platform.config.loader import LoadedConfig, load_config
from rl_platform.config.schema import Config

__all__ = ["Config", "LoadedConfig", "load_config"]
