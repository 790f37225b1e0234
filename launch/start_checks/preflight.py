"""Checks before anything starts that read nothing but the config and the devices: engines, ranks, output folder.

`model_checks` reads configs of models, `user_code_checks` imports code of the user. Not covered: data that the run
itself reads, such as its questions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import version

import torch

from rl_platform.config.layers import strings_of
from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import is_present, required
from rl_platform.launch.start_checks.output_check import output_problems
from rl_platform.launch.start_checks.sharding import (
    device_problems,
    sharding_problems,
    shares_weights,
    weight_sync_problems,
)
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Placement
from rl_platform.redact import MARK
from rl_platform.user_code import is_named


def check_cheap(config: Config, placement: Placement) -> None:
    """Raises ConfigError for a valid config that this version or this machine cannot run."""
    if config.rollout.multi_turn or config.rollout.agent:
        key = "rollout.multi_turn" if config.rollout.multi_turn else "rollout.agent"
        with required("rl_platform.components.agents", key):
            importlib.import_module("rl_platform.components.agents")
    if config.cluster.reallocate != "off":
        key, hint = "cluster.reallocate", "cluster.reallocate=off"
        with required("rl_platform.planner", key, hint), required("rl_platform.launch.reallocation", key, hint):
            importlib.import_module("rl_platform.launch.reallocation.reallocate")
    problems = [
        *placement_problems(config, placement),
        *output_problems(config),
        *removed_secrets(config.model_dump(mode="json")),
        *_missing_trackers(config),
    ]
    if problems:
        raise ConfigError(problems)


def placement_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields reasons why this version or this machine cannot run the config on this placement."""
    yield from _engines(config, placement)
    yield from _processes(config, placement)
    yield from weight_sync_problems(config, placement)
    yield from _process_group(config, placement)


def _missing_trackers(config: Config) -> Iterator[Problem]:
    names = [name for name in config.runner.logger_backends if not is_named(name)]
    if names and not is_present("rl_platform.trackers"):
        message, hint = "rl_platform.trackers is not installed", "runner.logger_backends=[]"
        yield Problem("runner.logger_backends", message, value=", ".join(names), hint=hint)
    elif names:
        from rl_platform.trackers.experiment_log import missing_trackers

        yield from missing_trackers(names)


def removed_secrets(config: object, key: str = "") -> Iterator[Problem]:
    """Yields the keys below `key` of a stored config whose secrets were not stored."""
    for name, value in strings_of(config, key):
        if value == MARK or f"={MARK}" in value:
            hint = f"{name}=${{env:NAME}} reads it from the environment variable NAME"
            yield Problem(name, "the secret that stood here is not stored in config.yaml", value=value, hint=hint)


def _engines(config: Config, placement: Placement) -> Iterator[Problem]:
    yield from sharding_problems(config, placement)
    yield from device_problems(config, placement)
    yield from rollout_engine_problems(config, on_gpu=bool(placement.accelerators.get("rollout")))


def rollout_engine_problems(config: Config, *, on_gpu: bool) -> Iterator[Problem]:
    """Yields reasons why the engine of `rollout.backend` cannot run here: it is not installed, in another version, or
    cannot do on a CPU what the config needs."""
    if config.rollout.backend == "sglang":
        yield from _sglang()
        if config.actor.router_replay and not on_gpu:
            message = "SGLang keeps the experts that it selects in memory that CUDA pins: it reports none on a CPU"
            hint = "rollout.backend=torch, or actor.router_replay=false"
            yield Problem("rollout.backend", message, value="sglang", hint=hint)
    if config.rollout.backend == "vllm":
        with required("rl_platform.engines.rollout.vllm", "rollout.backend", hint="rollout.backend=torch"):
            from rl_platform.engines.rollout.vllm.installation import installation_problem
        if problem := installation_problem(config.rollout.vllm.python):
            yield problem


def _sglang() -> Iterator[Problem]:
    with required("rl_platform.engines.rollout.sglang", "rollout.backend", hint="rollout.backend=torch"):
        from rl_platform.engines.rollout.sglang.program import VERSION
    if importlib.util.find_spec("sglang") is None:
        message, hint = "sglang is not installed", "pip install 'rl-platform[sglang]', or rollout.backend=torch"
        yield Problem("rollout.backend", message, value="sglang", hint=hint)
    elif (installed := version("sglang")) != VERSION:
        message = f"sglang {installed} is installed; weights are updated by the interface of {VERSION}"
        yield Problem("rollout.backend", message, value="sglang", hint=f"pip install sglang=={VERSION}")


def _processes(config: Config, placement: Placement) -> Iterator[Problem]:
    cluster = config.cluster
    used = max((local for host in placement.hosts for local in host.accelerators), default=-1)
    visible = torch.cuda.device_count()
    if cluster.runtime == "local" and not placement.fits_one_process:
        message = f"local is one process, but {placement.one_process_obstacle}"
        yield Problem("cluster.runtime", message, value="local", allowed="auto, ray", hint="cluster.runtime=auto")
    if cluster.address is None and cluster.num_nodes > 1:
        message = "without a Ray cluster to join there is this machine only"
        hint = "cluster.address: auto on a machine of a running Ray cluster; --plan shows any number"
        yield Problem("cluster.num_nodes", message, value=str(cluster.num_nodes), allowed="1", hint=hint)
    elif cluster.address is None and used >= visible:
        key = "cluster.gpus_per_node" if config.cluster.gpus_per_node is not None else "cluster.component_placement"
        message = f"GPU {used} is used, but torch sees {visible or 'none'} on this machine"
        hint = "cluster.gpus_per_node=0 runs on the CPU, null uses all GPUs; --plan accepts any number"
        if cluster.inventory is not None:
            key, hint = "cluster.inventory", "replace it to run here, as cluster={component_placement: {...}}"
        yield Problem(key, message, hint=hint)
    for position, group in enumerate(cluster.node_groups):
        if group.ray_labels and cluster.address is None:
            message = "only the nodes of a running Ray cluster have labels"
            hint = "cluster.address: auto on a machine of that cluster, started with ray start --labels"
            yield Problem(f"cluster.node_groups[{position}].ray_labels", message, hint=hint)
    yield from rank_problems(config, placement)


def rank_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the number of env ranks, and of ranks that own GPUs they cannot use."""
    if config.runner.task_type == "embodied":
        yield from _env_ranks(config, placement.world_size("env"))
        policy = placement.layout.policy
        if config.actor.device == "cpu" and placement.world_size(policy) > 1 and placement.accelerators[policy]:
            message = f"{placement.world_size(policy)} ranks with GPUs communicate by NCCL, which needs the GPUs"
            yield Problem("actor.device", message, value="cpu", hint=f"one rank of {policy}, or actor.device: gpu")
    for name in (*LEARNERS, "rollout"):
        owned = max((len(slot.accelerators) for slot in placement.components.get(name, ())), default=0)
        spreads = name == "rollout" and config.rollout.backend in HOSTED
        if owned > 1 and not placement.emulated and not spreads:
            message = f"a rank of {name} computes on one GPU and would keep {owned - 1} more from others, unused"
            hint = "place as many ranks as GPUs; only --plan accepts ranks with several GPUs"
            yield Problem("cluster.component_placement", message, value=f"{owned} GPUs per rank", hint=hint)


def _env_ranks(config: Config, ranks: int) -> Iterator[Problem]:
    env = config.env
    parts = ranks * env.pipeline_stages
    stages = f" in {env.pipeline_stages} stages (env.pipeline_stages)" if env.pipeline_stages > 1 else ""
    for key, count in (("num_envs", env.num_envs), ("num_workers", env.num_workers)):
        if count % parts:
            message = f"{ranks} ranks of env{stages} cannot share these equally"
            hint = f"a multiple of {parts}, or other ranks in cluster.component_placement"
            yield Problem(f"env.{key}", message, value=str(count), hint=hint)


def _process_group(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields a problem if no process group can connect actor and rollout."""
    group = config.rollout.weight_transfer == "group"
    if not group or placement.emulated or shares_weights(config, placement):
        return
    first = placement.components["actor"][0]
    sender = {(first.node, local) for local in first.accelerators}
    receivers = placement.accelerators["rollout"]
    if bool(sender) != bool(receivers):
        message = "one side is on GPUs and the other is not: no process group takes weights from one to the other"
    elif sender & receivers:
        message = "the rollout is on the GPU of actor[0], which sends them: NCCL connects different GPUs only"
    else:
        return
    yield Problem("rollout.weight_transfer", message, value="group", allowed="auto, memory")
