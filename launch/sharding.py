"""Whether the models can be sharded over their ranks as configured; checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.placement.component_shapes import shapes
from rl_platform.placement.model_shape import ModelShape
from rl_platform.placement.scheduler import Placement


def sharding_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the models' numbers of ranks and processes, whatever the machine."""
    for role in _placed(placement):
        section, ranks = config.section(role), placement.world_size(role)
        if section.training_backend == "fsdp" and ranks % section.parallel.context:
            context = section.parallel.context
            message = f"{ranks} ranks of {role} are no multiple of the {context} that split the tokens of a micro-batch"
            hint = f"it must divide the number of ranks of {role} in cluster.component_placement"
            yield Problem(f"{role}.parallel.context", message, value=str(context), hint=hint)
    roles = _by_megatron(config, placement)
    for role in roles:
        parallel, ranks = config.section(role).parallel, placement.world_size(role)
        if ranks % parallel.ranks:
            message = f"{ranks} ranks of {role} are no multiple of the {parallel.ranks} ranks that split a model"
            hint = f"tensor * pipeline * context must divide the ranks of {role} in cluster.component_placement"
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
    for role in _by_megatron(config, placement):
        shape = known.get(role)
        if isinstance(shape, ModelShape) and not (role == "reference" and _as_the_actor(config)):
            widths = (shape.shared, shape.dense_intermediate) if shape.experts else (shape.intermediate,)
            yield from _megatron(role).uneven(
                config.section(role).parallel,
                role,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                widths=[width for width in widths if width],
                layers=shape.layers,
                experts=shape.experts,
            )


def device_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the models' devices, and libraries that this machine lacks."""
    import torch

    from rl_platform.models.lora import not_installed

    for role in _placed(placement):
        if config.section(role).lora is not None and (missing := not_installed(f"{role}.lora")) is not None:
            yield missing
    for role in _by_megatron(config, placement):
        megatron = _megatron(role)
        on_cpu = not any(slot.accelerators for slot in placement.components[role])
        if on_cpu and torch.cuda.is_available():
            message = "Megatron would use the GPUs of this machine, and the placement gives it none"
            hint = "place it on a GPU, or hide them: CUDA_VISIBLE_DEVICES="
            yield Problem(f"{role}.training_backend", message, value="megatron", hint=hint)
        asked = config.section(role).kernels == "transformer_engine"
        if asked and (obstacle := _no_fused_layers(megatron, on_cpu)):
            key = _kernels_key(role)
            yield Problem(key, obstacle, value="transformer_engine", hint=f"{key}=torch")


def check_shards(config: Config, placement: Placement) -> None:
    """Raises ConfigError with the problems that a plan shows, whatever the machine."""
    if problems := [*sharding_problems(config, placement), *shape_problems(config, placement)]:
        raise ConfigError(problems)


def check_sharding(config: Config, placement: Placement) -> None:
    """Raises ConfigError for a model that cannot be shared as its layout says. Reads the models' configs only."""
    from rl_platform.engines.training.model_problems import model_problems
    from rl_platform.models.pretrained import load_config
    from rl_platform.models.tokenizer import load_tokenizer

    problems: list[Problem] = []
    for role in _placed(placement):
        section = config.section(role)
        by_megatron = section.training_backend == "megatron"
        routers = bool(section.router_aux_loss_coef) or (role == "actor" and config.actor.router_replay)
        if not (by_megatron or routers or section.parallel.context > 1 or section.lora is not None):
            continue
        if role == "reference" and _as_the_actor(config):
            continue  # the actor has the same problems
        own = getattr(config, role).model
        model, key = (config.actor.model, "actor.model") if own is None else (own, f"{role}.model")
        tokenizer = load_tokenizer(model, key)
        loaded = load_config(model, tokenizer.vocab_size, tokenizer.eos_token_ids[0], key)
        unfit = [*_megatron(role).unfit(loaded, section.parallel, role, section.kernels)] if by_megatron else []
        problems += unfit or model_problems(loaded, section, role)
    if problems:
        raise ConfigError(problems)


def check_kernels(config: Config, placement: Placement) -> None:
    """Raises ConfigError for fused layers that are configured and installed but cannot be imported.

    They may be built for another torch. A cluster to join may have other machines, so nothing is checked there.
    """
    asked = [role for role in _placed(placement) if config.section(role).kernels == "transformer_engine"]
    if not asked or config.cluster.address is not None:
        return
    if (reason := _megatron(asked[0]).transformer_engine_fails()) is not None:
        message, value = f"Transformer Engine is installed and cannot be imported: {reason}", "transformer_engine"
        keys = dict.fromkeys(_kernels_key(role) for role in asked)
        raise ConfigError([Problem(key, message, value=value, hint=f"{key}=torch") for key in keys])


def _megatron(role: str) -> ModuleType:
    """The rules of the Megatron backend. Raises ConfigError if that extra is not installed."""
    key = f"{role}.training_backend"
    with required("rl_platform.engines.training.megatron", key, hint=f"{key}=fsdp"):
        from rl_platform.engines.training.megatron import supported
    return supported


def _kernels_key(role: str) -> str:
    """The key of a role's kernels; a reference uses the actor's."""
    return f"{'actor' if role == 'reference' else role}.kernels"


def _placed(placement: Placement) -> list[str]:
    return [role for role in ("actor", "critic", "reference") if role in placement.components]


def _by_megatron(config: Config, placement: Placement) -> list[str]:
    return [role for role in _placed(placement) if config.section(role).training_backend == "megatron"]


def _as_the_actor(config: Config) -> bool:
    """Whether the reference is the actor's model on its backend in its layout."""
    reference, actor = config.reference_section, config.actor
    same_backend = (reference.training_backend, reference.parallel) == (actor.training_backend, actor.parallel)
    return same_backend and reference.model == actor.model


def _no_fused_layers(megatron: ModuleType, on_cpu: bool) -> str | None:
    if on_cpu:
        return "Transformer Engine needs a GPU, and the placement gives it none"
    return None if megatron.transformer_engine_installed() else "Transformer Engine is not installed"


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
