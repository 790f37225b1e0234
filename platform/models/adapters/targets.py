"""Names of the linear layers with adapters. Without torch, for checks before a start."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rl_platform.config.schema.models import Lora
from rl_platform.errors import Problem


def unknown_targets(linear: Collection[str], lora: Lora, key: str) -> Iterator[Problem]:
    """Yields a problem for each name in `target_modules` that is not in `linear`, the model's linear layers.

    `key`: the section, such as actor.lora.
    """
    allowed = ", ".join(sorted(linear))
    message = "the model has no linear layer of this name; experts have no adapters"
    for name in lora.target_modules:
        if name not in linear:
            yield Problem(f"{key}.target_modules", message, value=name, allowed=allowed)
