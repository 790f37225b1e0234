"""The type in which models compute: what `model.dtype: auto` selects here, and whether bfloat16 saves time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rl_platform.config.loader import LoadedConfig
from rl_platform.config.schema import Config
from rl_platform.placement.estimates.hardware import cpu_flags, device_of
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement

FAST = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"}  # flags of Linux, the fastest first
EMBODIED = ("float32", "bfloat16 is selected for language models only")
NEITHER = "this processor has neither AMX-BF16 nor AVX512-BF16"


def with_types(loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> LoadedConfig:
    """Returns the config with `model.dtype` of components set to the type that `auto` selects here, and its notes."""
    config, types = loaded.config, compute_types(loaded.config, placement, inventory)
    chosen = [f"{name}.model.dtype auto is {dtype} here: {why}" for name, (dtype, why) in types.items()]
    config = config.changed({f"{name}.model.dtype": dtype for name, (dtype, _) in types.items()})
    notes = (*loaded.notes, *chosen, *slow_types(loaded.config, placement))
    return replace(loaded, config=config, notes=notes)


def compute_types(config: Config, placement: Placement, inventory: Inventory) -> dict[str, tuple[str, str]]:
    """Returns the type and the reason of each component whose `model.dtype` is auto.

    The choice depends on hardware features and not on a measurement, so a resumed run computes in the same type.
    """
    types = {}
    for name, wanted, on_gpus in _models(config, placement):
        if wanted == "auto":
            types[name] = _fastest(inventory, on_gpus) if config.runner.task_type == "reasoning" else EMBODIED
    return types


def slow_types(config: Config, placement: Placement) -> Iterator[str]:
    """Yields a note for each component whose bfloat16 saves no time."""
    for name, wanted, on_gpus in _models(config, placement):
        if wanted == "bfloat16" and not on_gpus and _instruction() is None:
            yield (
                f"{name}.model.dtype bfloat16 saves no time here: {NEITHER}. A Llama rounds to bfloat16 and computes "
                f"in float32, training of others takes several times as long; the built-in generator uses float32. "
                f"Faster: {name}.model.dtype=auto"
            )


def _models(config: Config, placement: Placement) -> Iterator[tuple[str, str, bool]]:
    """Component, `model.dtype`, and whether it is on GPUs, for each component with a model of its own."""
    for name in ("actor", "critic", "reference"):
        model = getattr(config, name).model
        if model is not None:
            yield name, model.dtype, bool(placement.accelerators.get(name)) and not placement.emulated


def _fastest(inventory: Inventory, on_gpus: bool) -> tuple[str, str]:
    if on_gpus:
        device = device_of(inventory)
        if not device.known:
            return "float32", f"it is not known whether this GPU ({device.kind}) multiplies bfloat16 faster"
        return "bfloat16", f"a GPU of kind {device.kind} multiplies it {device.bf16 / device.fp32:.0f} times as fast"
    instruction = _instruction()
    return ("float32", NEITHER) if instruction is None else ("bfloat16", f"this processor has {instruction}")


def _instruction() -> str | None:
    """Returns the fastest instruction set for bfloat16 of this machine's processor; None: it has none."""
    flags = cpu_flags()
    return next((name for flag, name in FAST.items() if flag in flags), None)
