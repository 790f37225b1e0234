"""Checks before the start whether the Megatron backend can train the models of a placement in their layouts."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.schema import Config
from rl_platform.engines.training.megatron import supported
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.scheduler import Placement


def rank_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the models' numbers of ranks and processes, whatever the machine."""
    roles = trained_roles(config, placement)
    for role in roles:
        parallel, ranks = config.section(role).parallel, placement.world_size(role)
        if ranks % parallel.ranks:
            message = f"{ranks} ranks of {role} are no multiple of the {parallel.ranks} ranks that split a model"
            hint = (
                f"tensor * pipeline * context must divide the ranks of {role} in cluster.component_placement: "
                f'"all:0-{parallel.ranks - 1}" has {parallel.ranks}'
            )
            if parallel.expert > 1:
                hint += ", and so must expert * pipeline"
            yield Problem(f"{role}.parallel", message, value=_show(config, role), hint=hint)
        elif role != "reference":
            copies = ranks // (parallel.tensor * parallel.pipeline * parallel.context)
            yield from _uneven_micro_batches(config, role, copies)
    for role in roles[1:]:
        first = next(other for other in roles if other == role or _share_hosts(placement, other, role))
        if _layout(config, first)[:3] != _layout(config, role)[:3]:  # tokens can be split differently
            message = f"all models of a process need the same layout, and that of the {first} is {_show(config, first)}"
            hint = "use equal layouts, or separate keys in cluster.component_placement"
            yield Problem(f"{role}.parallel", message, value=_show(config, role), hint=hint)


def shape_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of models without equal shares in their layout. Covers shapes that are known without loading."""
    known, _ = shapes(config)
    for role in trained_roles(config, placement):
        shape = known.get(role)
        if isinstance(shape, ModelShape) and not (role == "reference" and config.reference_as_actor):
            widths = (shape.shared, shape.dense_intermediate) if shape.experts else (shape.intermediate,)
            yield from supported.uneven(
                config.section(role).parallel,
                role,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                widths=[width for width in widths if width],
                layers=shape.layers,
                experts=shape.experts,
            )


def device_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the models' devices, and layers that this machine lacks."""
    import torch

    for role in trained_roles(config, placement):
        on_cpu = not any(slot.accelerators for slot in placement.components[role])
        if on_cpu and torch.cuda.is_available():
            message = "Megatron would use the GPUs of this machine, and the placement gives it none"
            hint = "place it on a GPU, or hide them: CUDA_VISIBLE_DEVICES="
            yield Problem(f"{role}.training_backend", message, value="megatron", hint=hint)
        asked = config.section(role).kernels == "transformer_engine"
        if asked and (obstacle := _no_fused_layers(on_cpu)):
            key = _kernels_key(role)
            yield Problem(key, obstacle, value="transformer_engine", hint=f"{key}=torch")


def check_kernels(config: Config, placement: Placement) -> None:
    """Raises ConfigError for fused layers that are configured and installed but cannot be imported.

    They may be built for another torch. A cluster to join may have other machines, so nothing is checked there.
    """
    asked = [role for role in trained_roles(config, placement) if config.section(role).kernels == "transformer_engine"]
    if not asked or config.cluster.address is not None or not supported.transformer_engine_installed():
        return
    if (reason := supported.transformer_engine_fails()) is not None:
        message, value = f"Transformer Engine is installed and cannot be imported: {reason}", "transformer_engine"
        keys = dict.fromkeys(_kernels_key(role) for role in asked)
        raise ConfigError([Problem(key, message, value=value, hint=f"{key}=torch") for key in keys])


def trained_roles(config: Config, placement: Placement) -> list[str]:
    """Returns the roles with a model on this backend."""
    roles = [role for role in ("actor", "critic", "reference") if role in placement.components]
    return [role for role in roles if config.section(role).training_backend == "megatron"]


def _kernels_key(role: str) -> str:
    """Returns the key of a role's kernels; a reference uses the actor's."""
    return f"{'actor' if role == 'reference' else role}.kernels"


def _no_fused_layers(on_cpu: bool) -> str | None:
    if on_cpu:
        return "Transformer Engine needs a GPU, and the placement gives it none"
    return None if supported.transformer_engine_installed() else "Transformer Engine is not installed"


def _uneven_micro_batches(config: Config, role: str, copies: int) -> Iterator[Problem]:
    """Yields a problem if a rank's micro-batches are no multiple of its interleaved stages.

    If tokens limit a micro-batch, their number is not known here; the trainer adds empty ones.
    """
    section = config.section(role)
    stages, rows = section.parallel.pipeline, section.micro_batch_size
    if section.parallel.virtual_pipeline == 1 or rows is None or section.max_tokens_per_micro_batch is not None:
        return
    share = -(-config.mini_batch_size(role) // copies)
    number = -(-share // rows)
    if number % stages:
        message = (
            f"interleaved stages take {stages} micro-batches at a time, and a rank's {share} rows of a mini-batch "
            f"make {number}"
        )
        yield Problem(f"{role}.micro_batch_size", message, value=str(rows), hint=f"{role}.parallel.virtual_pipeline=1")


def _layout(config: Config, role: str) -> tuple[int, int, int, int]:
    parallel = config.section(role).parallel
    return parallel.tensor, parallel.pipeline, parallel.expert, parallel.context


def _show(config: Config, role: str) -> str:
    tensor, pipeline, *others = _layout(config, role)
    named = zip(("expert", "context"), others, strict=True)
    return f"tensor {tensor}, pipeline {pipeline}" + "".join(f", {name} {size}" for name, size in named if size > 1)


def _share_hosts(placement: Placement, first: str, second: str) -> bool:
    return any({first, second} <= {name for name, _ in host.members} for host in placement.hosts)
