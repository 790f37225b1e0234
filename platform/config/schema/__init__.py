"""The schema of a config: one file per section, and the whole `Config`."""

from __future__ import annotations

from rl_platform.config.schema.config import Config

__all__ = ["Config"]
