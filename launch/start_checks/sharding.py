"""Checks before the start that the models and their weights can be distributed over the ranks as configured."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import is_present, required
from rl_platform.launch.start_checks.model_problems import context_problems
from rl_platform.placement.scheduler import Placement

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rl_platform.config.schema.models import Model
    from rl_platform.placement.estimates.model_shape import ModelShape


def sharding_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the models' numbers of ranks and processes, whatever the machine."""
    for role in _placed(placement):
        section, ranks = config.section(role), placement.world_size(role)
        if section.training_backend == "fsdp" and ranks % section.parallel.context:
            context = section.parallel.context
            message = f"{ranks} ranks of {role} are no multiple of the {context} that split the tokens of a micro-batch"
            hint = (
                f"it must divide the ranks of {role} in cluster.component_placement: "
                f'"all:0-{context - 1}" has {context}'
            )
            yield Problem(f"{role}.parallel.context", message, value=str(context), hint=hint)
    if (megatron := _megatron(config, placement)) is not None:
        yield from megatron.rank_problems(config, placement)


def shape_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of models in their layout and with their adapters, if their shapes are known without loading."""
    problems: list[Problem] = []
    if (megatron := _megatron(config, placement)) is not None:
        problems = [*megatron.shape_problems(config, placement)]
    yield from problems
    unequal = {problem.key for problem in problems}
    for role, shape in language_shapes(config, placement):
        section = config.section(role)
        if f"{role}.parallel.tensor" not in unequal:
            yield from context_problems(section, role, shape.heads, shape.kv_heads)
        if section.lora is not None:
            with required("rl_platform.models.adapters", f"{role}.lora"):
                from rl_platform.models.adapters.targets import unknown_targets

            yield from unknown_targets(shape.linear_layers, section.lora, f"{role}.lora")


def language_shapes(config: Config, placement: Placement) -> Iterator[tuple[str, ModelShape]]:
    """Yields the trained language models, and a reference of its own, whose shapes are known without loading."""
    if not is_present("rl_platform.placement.estimates"):
        return
    from rl_platform.placement.estimates.component_shapes import shapes
    from rl_platform.placement.estimates.model_shape import ModelShape

    known, _ = shapes(config)
    for role in _placed(placement):
        shape = known.get(role)
        if isinstance(shape, ModelShape) and not (role == "reference" and config.reference_as_actor):
            yield role, shape


def weight_sync_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of keys that have no effect where the rollout reads the actor's weights in the same process."""
    if not shares_weights(config, placement):
        return
    for name, value, usual in (("sync", "delta", "full"), ("weight_transfer", "group", "auto")):
        if getattr(config.rollout, name) == value:
            message = "the rollout shares the actor's process and reads its weights where they are"
            hint = "place rollout under a key of its own, with cluster.runtime ray or on other devices"
            yield Problem(f"rollout.{name}", message, value=value, allowed=usual, hint=hint)


def shares_weights(config: Config, placement: Placement) -> bool:
    """Returns whether all rollout ranks are in the process of the actor's first rank."""
    readers = {host.name for host in placement.hosts for name, _ in host.members if name == "rollout"}
    actors = {("actor", 0), ("actor_critic", 0)}
    publisher = next(host.name for host in placement.hosts if actors & set(host.members))
    return readers == {publisher} or not placement.uses_ray(config.cluster)


def device_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the models' devices, and libraries that this machine lacks."""
    for role in _placed(placement):
        if config.section(role).lora is not None:
            with required("rl_platform.models.adapters", f"{role}.lora"):
                from rl_platform.models.adapters.lora import not_installed

            if (missing := not_installed(f"{role}.lora")) is not None:
                yield missing
    if (megatron := _megatron(config, placement)) is not None:
        yield from megatron.device_problems(config, placement)


def check_layout(config: Config, placement: Placement) -> None:
    """Raises ConfigError with the problems of the layout that do not depend on the machine."""
    checks = (sharding_problems, shape_problems, weight_sync_problems)
    if problems := [problem for check in checks for problem in check(config, placement)]:
        raise ConfigError(problems)


def check_sharding(config: Config, placement: Placement) -> None:
    """Raises ConfigError for a model that cannot be shared as its layout says. Reads the models' configs only."""
    from rl_platform.launch.start_checks.model_problems import model_problems

    problems: list[Problem] = []
    for role in _placed(placement):
        section = config.section(role)
        by_megatron = section.training_backend == "megatron"
        routers = bool(section.router_aux_loss_coef) or (role == "actor" and config.actor.router_replay)
        if not (by_megatron or routers or section.parallel.context > 1 or section.lora is not None):
            continue
        if role == "reference" and config.reference_as_actor:
            continue  # the actor has the same problems
        loaded, _, _ = model_config(config, role)
        unfit = []
        if by_megatron:
            from rl_platform.engines.training.megatron.supported import unfit as unfit_for_megatron

            unfit = [*unfit_for_megatron(loaded, section.parallel, role, section.kernels)]
        problems += unfit or model_problems(loaded, section, role)
    if problems:
        raise ConfigError(problems)


def model_config(config: Config, role: str) -> tuple[PretrainedConfig, Model, str]:
    """Returns the transformers config of a component's language model, its section and the key of that.

    Raises ConfigError for a model that the platform does not compute.
    """
    from rl_platform.models.causal_lm import load_config
    from rl_platform.models.tokenizer import load_tokenizer

    own = getattr(config, role).model
    section, key = (config.actor.model, "actor.model") if own is None else (own, f"{role}.model")
    tokenizer = load_tokenizer(section, key)
    return load_config(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0], key), section, key


def check_kernels(config: Config, placement: Placement) -> None:
    """Raises ConfigError for fused layers that are configured and installed but cannot be imported."""
    if (megatron := _megatron(config, placement)) is not None:
        megatron.check_kernels(config, placement)


def _megatron(config: Config, placement: Placement) -> ModuleType | None:
    """Returns the checks of the Megatron backend; None if no model uses it. Raises ConfigError if it is missing."""
    role = next((role for role in _placed(placement) if config.section(role).training_backend == "megatron"), None)
    if role is None:
        return None
    key = f"{role}.training_backend"
    with required("rl_platform.engines.training.megatron", key, hint=f"{key}=fsdp"):
        from rl_platform.engines.training.megatron import layouts
    return layouts


def _placed(placement: Placement) -> list[str]:
    return [role for role in ("actor", "critic", "reference") if role in placement.components]
