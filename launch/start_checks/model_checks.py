"""Checks before anything starts that read the configs of models: architectures, sizes, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Model
from rl_platform.config.schema.reward import RewardModel
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.reasoning.question import Split
from rl_platform.errors import ConfigError, Problem, check_all
from rl_platform.extras import required
from rl_platform.launch.start_checks.sharding import check_sharding, model_config
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

BYTES_TRAINED = 16  # per parameter: float32 weight, gradient and two Adam moments
BYTES_SAVED = 12  # the same without the gradient
BYTES_FROZEN = 4


def check_architectures(config: Config, placement: Placement) -> None:
    """Raises ConfigError with the problems of all models that their config.json shows: families, quantised weights,
    positions, other tokens than the actor's, outputs that a full KL cannot compare. Reads no weights."""
    from rl_platform.models.build import length_problem
    from rl_platform.models.language import LogitTransform

    outputs: dict[str, LogitTransform] = {}

    def check_model(name: str) -> None:
        loaded, section, key = model_config(config, name)
        if key != "actor.model":
            _check_tokens(config, section, loaded, key)
        outputs[name] = LogitTransform.of(loaded)
        if (problem := length_problem(config, loaded, key)) is not None:
            raise ConfigError([problem])

    def check_outputs() -> None:
        compared = {outputs[name] for name in ("actor", "reference") if name in outputs}
        if config.algorithm.full_kl and len(compared) > 1:
            message = (
                "a full KL computes the logits of both models alike, and the reference scales or caps its own otherwise"
            )
            allowed = "a model with the actor's scale and cap of logits"
            raise ConfigError([Problem("reference.model", message, allowed=allowed)])

    checks: list[Callable[[], object]] = [
        partial(check_model, name) for name in ("actor", "critic", "reference") if name in placement.components
    ]
    if config.reward.model is not None:
        checks.append(partial(classifier_parts, config.reward.model))
    check_all(*checks, check_outputs)


def _check_tokens(config: Config, section: Model, loaded: PretrainedConfig, key: str) -> None:
    """Raises ConfigError if the model of `key` cannot read the actor's tokens, or reads them as other text."""
    from rl_platform.models.tokenizer import check_same_tokens, load_tokenizer

    tokenizer = load_tokenizer(config.actor.model)
    check_same_tokens(tokenizer, load_tokenizer(section, key), key)
    written = min(tokenizer.vocab_size, model_config(config, "actor")[0].vocab_size)  # some vocabularies are padded
    if loaded.vocab_size < written:
        message = f"the model has {loaded.vocab_size} tokens, and the actor writes {written}"
        raise ConfigError([Problem(key, message, allowed="a model with the actor's vocabulary")])


def checkpoint_bytes(config: Config, placement: Placement, inventory: Inventory, world: EnvSpaces | Split) -> int:
    """Returns the bytes of a checkpoint. Raises ConfigError if the models do not fit."""
    return policy_bytes(config, world) if isinstance(world, EnvSpaces) else check_models(config, placement, inventory)


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


def _parameters(config: Config, name: str) -> tuple[int, int]:
    """Returns the numbers of frozen and trained parameters of a component's language model, built without memory."""
    from rl_platform.models.causal_lm import meta_causal_lm

    loaded, section, key = model_config(config, name)
    if section.path is None:
        network = meta_causal_lm(loaded)
    else:
        from rl_platform.models.pretrained.pretrained_lm import empty_causal_lm

        network = empty_causal_lm(loaded, section.path, f"{key}.path")
    head = 0
    if name == "critic":  # a scalar head replaces the vocabulary's; it is trained beside adapters too
        network, head = network.base_model, loaded.hidden_size + 1
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

    loaded = classifier_parts(section)[1]
    with init_empty_weights():
        network = AutoModelForSequenceClassification.from_config(loaded)
    size: int = sum(parameter.numel() for parameter in network.parameters())
    return size * (BYTES_FROZEN if section.dtype == "float32" else BYTES_FROZEN // 2)


def classifier_parts(section: RewardModel) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Returns tokenizer and config of a reward model. Raises ConfigError if packages of `reward.type` are missing."""
    with required("rl_platform.components.reward_models", "reward.type"):
        from rl_platform.components.reward_models.classifier import load_parts

    return load_parts(section)


def policy_bytes(config: Config, spaces: EnvSpaces) -> int:
    """Estimates the bytes of an embodied run's checkpoint: trained parameters, their moments, observations."""
    from rl_platform.components.actor import trained_policy

    if config.actor.model.type == "vla":  # its language model is read from a folder
        with required("rl_platform.placement.estimates", "actor.model.type"):
            from rl_platform.placement.estimates.component_shapes import shapes
            from rl_platform.placement.estimates.policy_shape import PolicyShape

        _check_backbone(config)
        shape = next((each for each in shapes(config)[0].values() if isinstance(each, PolicyShape)), None)
        trained = 0 if shape is None else shape.trained_parameters(config.actor.lora)
    else:
        with torch.device("meta"):
            parameters = trained_policy(config, spaces, 0).parameters()
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return trained * BYTES_SAVED + config.env.num_envs * spaces.observation_size * (1 if spaces.images else 4)


def _check_backbone(config: Config) -> None:
    """Raises ConfigError for a language model that a vision-language-action policy does not compute."""
    with required("rl_platform.models.policies", "actor.model.type"):
        from rl_platform.models.policies.vla import refuse_features

    refuse_features(model_config(config, "actor")[0], config.actor.model.path, 0)
