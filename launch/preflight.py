"""Checks before anything starts: engines, devices, output folder, models, memory, environment, reward.

The problems of all checks are reported together, of cheap ones first. Others read model configs, build an environment
or start a scoring process. Not covered: data that the run itself reads, such as its questions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import psutil
import torch

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.config.schema.reward import RewardModel, Scoring
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.reasoning.question import Split
from rl_platform.errors import ConfigError, Problem, check_all, problems_of
from rl_platform.extras import is_present, required
from rl_platform.launch.cluster import uses_ray
from rl_platform.launch.extensions import check_extensions
from rl_platform.launch.output import output_problems
from rl_platform.launch.sharding import check_sharding, device_problems, sharding_problems
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Placement
from rl_platform.redact import MARK
from rl_platform.user_code import is_named

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from rl_platform.config.schema.models import Model

BYTES_TRAINED = 16  # per parameter: float32 weight, gradient and two Adam moments
BYTES_SAVED = 12  # the same without the gradient
BYTES_FROZEN = 4


def check_cheap(config: Config, placement: Placement) -> None:
    """Raises ConfigError for a valid config that this version or this machine cannot run."""
    if config.rollout.multi_turn or config.rollout.agent:
        key = "rollout.multi_turn" if config.rollout.multi_turn else "rollout.agent"
        with required("rl_platform.components.agents", key):
            importlib.import_module("rl_platform.components.agents")
    problems = [
        *_engines(config, placement),
        *_processes(config, placement),
        *_weight_sync(config, placement),
        *output_problems(config),
        *_removed_secrets(config.model_dump(mode="json")),
        *_missing_trackers(config),
    ]
    if problems:
        raise ConfigError(problems)


def _missing_trackers(config: Config) -> Iterator[Problem]:
    names = [name for name in config.runner.logger_backends if not is_named(name)]
    if names and not is_present("rl_platform.trackers"):
        message, hint = "rl_platform.trackers is not installed", "runner.logger_backends=[]"
        yield Problem("runner.logger_backends", message, value=", ".join(names), hint=hint)
    elif names:
        from rl_platform.trackers.experiment_log import missing_trackers

        yield from missing_trackers(names)


def _removed_secrets(value: object, key: str = "") -> Iterator[Problem]:
    """Yields the keys of a stored config whose secrets were not stored."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _removed_secrets(each, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _removed_secrets(each, f"{key}[{index}]")
    elif isinstance(value, str) and (value == MARK or f"={MARK}" in value):
        hint = f"{key}=${{env:NAME}} reads it from the environment variable NAME"
        yield Problem(key, "the secret that stood here is not stored in config.yaml", value=value, hint=hint)


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


def _weight_sync(config: Config, placement: Placement) -> Iterator[Problem]:
    readers = {host.name for host in placement.hosts for name, _ in host.members if name == "rollout"}
    actors = {("actor", 0), ("actor_critic", 0)}
    publisher = next(host.name for host in placement.hosts if actors & set(host.members))
    together = readers == {publisher} or not uses_ray(config.cluster, placement)
    for name, value, usual in (("sync", "delta", "full"), ("weight_transfer", "group", "auto")):
        if getattr(config.rollout, name) == value and together:
            message = "the rollout shares the actor's process and reads its weights where they are"
            hint = "place rollout under a key of its own, with cluster.runtime ray or on other devices"
            yield Problem(f"rollout.{name}", message, value=value, allowed=usual, hint=hint)
    if config.rollout.weight_transfer == "group" and not together and not placement.emulated:
        yield from _group_problems(placement)


def _group_problems(placement: Placement) -> Iterator[Problem]:
    """Yields a problem if no process group can connect actor and rollout."""
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


def check_architectures(config: Config, placement: Placement) -> None:
    """Raises ConfigError with the problems of all models that their config.json shows: families, quantised weights,
    positions, outputs that a full KL cannot compare. Reads no weights."""
    from rl_platform.models.build import length_problem
    from rl_platform.models.language import LogitTransform

    problems: dict[str, Problem] = {}  # by text: components share models
    outputs = {}
    for name in ("actor", "critic", "reference"):
        if name not in placement.components:
            continue
        try:
            model_config, _, key = _model_config(config, name)
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
            continue
        outputs[name] = LogitTransform.of(model_config)
        if (problem := length_problem(config, model_config, key)) is not None:
            problems[str(problem)] = problem
    if config.reward.model is not None:
        try:
            _classifier_parts(config.reward.model)
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    full_kl = config.algorithm.full_kl_in_reward or config.algorithm.full_kl_in_loss
    if full_kl and len({*(outputs[name] for name in ("actor", "reference") if name in outputs)}) > 1:
        message = (
            "a full KL computes the logits of both models alike, and the reference scales or caps its own otherwise"
        )
        problem = Problem("reference.model", message, allowed="a model with the actor's scale and cap of logits")
        problems[str(problem)] = problem
    if problems:
        raise ConfigError([*problems.values()])


def check_models(config: Config, placement: Placement, inventory: Inventory) -> int:
    """Returns the bytes of a checkpoint. Raises ConfigError if a model cannot be loaded or memory is too small.

    Counts weights, gradients and optimizer state, without activations and caches.
    """
    from rl_platform.models.tokenizer import load_tokenizer, stops

    check_sharding(config, placement)
    if config.rollout.stop:
        stops(load_tokenizer(config.actor.model), config.rollout.stop)
    sizes = {
        name: _parameters(config, name) for name in ("actor", "critic", "reference") if name in placement.components
    }
    needs = {name: frozen * BYTES_FROZEN + trained * BYTES_TRAINED for name, (frozen, trained) in sizes.items()}
    if not any(host.accelerators for host in placement.hosts):
        needs["rollout (repacked weights)"] = sum(sizes["actor"]) * BYTES_FROZEN
        if (scoring := config.reward.classifier) is not None and scoring.model is not None:
            needs["reward"] = _reward_bytes(scoring.model)
        _check_memory(config, needs, inventory)
    return sum(trained for _, trained in sizes.values()) * BYTES_SAVED


def _check_memory(config: Config, needs: dict[str, int], inventory: Inventory) -> None:
    free = min(psutil.virtual_memory().available, inventory.nodes[0].memory or psutil.virtual_memory().total)
    if sum(needs.values()) <= free:
        return
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needs.items())
    message = f"training needs {sum(needs.values()) / 2**30:.1f} GiB ({parts}), {free / 2**30:.1f} GiB are free"
    value = config.actor.model.path or "random_init"
    raise ConfigError([Problem("actor.model", message, value=value, hint="a smaller model, or a GPU")])


def _model_config(config: Config, name: str) -> tuple[PretrainedConfig, Model, str]:
    """Returns the transformers config of a component's language model, its section and the key of that.

    Raises ConfigError for a model that the platform does not compute.
    """
    from rl_platform.models.causal_lm import load_config
    from rl_platform.models.tokenizer import load_tokenizer

    section, key = getattr(config, name).model, f"{name}.model"
    if section is None:
        section, key = config.actor.model, "actor.model"
    tokenizer = load_tokenizer(section, key)
    return load_config(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0], key), section, key


def _parameters(config: Config, name: str) -> tuple[int, int]:
    """Returns the numbers of frozen and trained parameters of a component's language model, built without memory."""
    from rl_platform.models.causal_lm import meta_causal_lm

    model_config, section, key = _model_config(config, name)
    if section.path is None:
        network = meta_causal_lm(model_config)
    else:
        from rl_platform.models.pretrained.pretrained_lm import empty_causal_lm

        network = empty_causal_lm(model_config, section.path, f"{key}.path")
    head = 0
    if name == "critic":  # a scalar head replaces the vocabulary's; it is trained beside adapters too
        network, head = network.base_model, model_config.hidden_size + 1
    count = sum(parameter.numel() for parameter in network.parameters())
    if name == "reference":
        return count, 0
    lora = getattr(config, name).lora
    if lora is None:
        return 0, count + head
    from rl_platform.models.adapters.lora import adapter_parameters

    return count, adapter_parameters(network.base_model, lora) + head


def _reward_bytes(section: RewardModel) -> int:
    """Returns the bytes of a reward model's weights, built without memory."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForSequenceClassification

    model_config = _classifier_parts(section)[1]
    with init_empty_weights():
        network = AutoModelForSequenceClassification.from_config(model_config)
    size = sum(parameter.numel() for parameter in network.parameters())
    return size * (BYTES_FROZEN if section.dtype == "float32" else BYTES_FROZEN // 2)


def _classifier_parts(section: RewardModel) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    with required("rl_platform.components.reward_models", "reward.type"):
        from rl_platform.components.reward_models.classifier import load_parts

    return load_parts(section)


def policy_bytes(config: Config, spaces: EnvSpaces) -> int:
    """Estimates the bytes of an embodied run's checkpoint: trained parameters, their moments, observations."""
    from rl_platform.components.actor import embodied_policy

    if config.actor.model.type == "vla":  # its language model is read from a folder
        with required("rl_platform.placement.estimates", "actor.model.type"):
            from rl_platform.placement.estimates.component_shapes import shapes
            from rl_platform.placement.estimates.policy_shape import PolicyShape

        _check_backbone(config)
        shape = next((each for each in shapes(config)[0].values() if isinstance(each, PolicyShape)), None)
        trained = 0 if shape is None else shape.trained_parameters(config.actor.lora)
    else:
        with required("rl_platform.models.policies", "actor.model"), torch.device("meta"):
            trained = sum(parameter.numel() for parameter in embodied_policy(config, spaces, 0).parameters())
    return trained * BYTES_SAVED + config.env.num_envs * spaces.observation_size * (1 if spaces.images else 4)


def _check_backbone(config: Config) -> None:
    """Raises ConfigError for a language model that a vision-language-action policy does not compute."""
    with required("rl_platform.models.policies", "actor.model.type"):
        from rl_platform.models.policies.vla import refuse_features

    refuse_features(_model_config(config, "actor")[0], config.actor.model.path, 0)


def check_user_functions(config: Config) -> None:
    """Raises ConfigError with all code of the user that cannot be imported; see also `check_reward`."""
    checks = [check_extensions]
    if config.runner.task_type == "reasoning":
        checks += [check_reward, _check_agent]
    check_all(*(partial(check, config) for check in checks))


def _check_agent(config: Config) -> None:
    """Raises ConfigError for schemas, parameters and a format of tools, or an environment, that cannot be used."""
    if (agent := config.rollout.agent) is None or agent.function is not None:
        return
    from rl_platform.components.agents.environment_loop import check_environment
    from rl_platform.components.agents.tool_formats import format_of
    from rl_platform.components.agents.tool_loop import schemas_of
    from rl_platform.models.tokenizer import load_tokenizer

    if agent.environment is not None:
        check_environment(agent)
    if agent.tools:
        schemas_of(agent)
        format_of(load_tokenizer(config.actor.model), agent, config.data.use_chat_template)


def check_reward(config: Config) -> None:
    """Raises ConfigError or WorkerError if the user's reward function cannot be imported or the reward model is
    invalid, Unreachable if the reward server does not answer. Does not read the weights of a reward model.
    """
    for key, scoring in config.reward.parts:
        with problems_of(key, "reward"):
            _check_scoring(config, scoring)


def check_reward_functions(config: Config) -> None:
    """As `check_reward`, of functions of the user alone: no server is asked and no model is looked for."""
    for key, scoring in config.reward.parts:
        if is_named(scoring.type):
            with problems_of(key, "reward"):
                _check_scoring(config, scoring)


def _check_scoring(config: Config, scoring: Scoring) -> None:
    section = next((name for name in ("judge", "model", "code") if name == scoring.type), None)
    if problems := list(_removed_secrets(scoring.address, f"reward.{section}.url" if section else "reward.url")):
        raise ConfigError(problems)
    from rl_platform.components.reward import http_scorer, process_scorer, verifier_spec

    one = scoring.model_copy(update={"num_workers": 1})
    if scoring.type == "code":
        with required("rl_platform.envs.reasoning.sandbox", "reward.type"):
            process_scorer(config.data, one).close()
    elif scoring.asks_server:
        with (
            required("rl_platform.envs.reasoning.servers", "reward.type"),
            required("rl_platform.components.reward_models", "reward.type"),
        ):
            http_scorer(config.data, scoring).close()
    elif scoring.model is not None:
        _classifier_parts(scoring.model)
    elif not verifier_spec(config.data, scoring).built_in:
        process_scorer(config.data, one).close()


def check_tests(config: Config, questions: Split) -> None:
    """Raises DataError for a question without the tests that a reward of type code needs."""
    from rl_platform.envs.reasoning import build

    if any(part.type == "code" for _, part in config.reward.parts):
        with required("rl_platform.envs.reasoning.sandbox", "reward.type"):
            build.check_tests([*questions.train, *questions.validation])
