"""The facts of a config in which two runs must agree for one to load the checkpoints of the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rl_platform.checkpoint.fingerprints import FILES_OF, files_hash
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import FLOW_POLICIES, INSTRUCTED, Model, Trainable
from rl_platform.redact import without_secrets


def fingerprint(config: Config) -> str:
    """Returns lines `key: value` in which two configs must agree for one to load the checkpoints of the other."""
    facts: dict[str, object] = {"runner.task_type": config.runner.task_type}
    if config.runner.task_type == "embodied":
        env = config.env.model_dump(
            include={"id", "kwargs", "num_envs", "max_episode_steps", "normalize_observations", "normalize_rewards"}
        )
        facts |= {f"env.{name}": value for name, value in env.items()}
        if config.env.backend != "mujoco":
            facts["env.backend"] = config.env.backend  # each backend has a saved state of its own
        if config.env.tasks:
            facts["env.tasks"] = [task.model_dump() for task in config.env.tasks]
        facts |= _policy_facts(config)
        if config.actor.model.num_action_chunks > 1:
            facts |= _facts("actor.model", config.actor.model, {"num_action_chunks"})
            facts["algorithm.reward_type"] = config.algorithm.reward_type  # how many values there are
    else:
        language_model = {"path", "random_init", "tokenizer"}
        facts |= _facts("actor.model", config.actor.model, language_model)
        if config.critic.use_critic_model:
            facts |= _facts("critic.model", config.model_of("critic"), language_model)
        facts |= _adapters(config)
    facts |= _files(facts)
    return "\n".join(f"{key}: {json.dumps(value, sort_keys=True)}" for key, value in without_secrets(facts).items())


def _files(facts: Mapping[str, object]) -> dict[str, object]:
    """Returns the hashes of the model folders among the facts. Ids of a hub and the packaged model have none."""
    hashes: dict[str, object] = {}
    for key, value in facts.items():
        if key.endswith((".model.path", ".model.tokenizer")) and isinstance(value, str):
            folder = Path(value).expanduser()
            if folder.is_dir():
                hashes[FILES_OF + key] = files_hash(folder)
    return hashes


def _policy_facts(config: Config) -> dict[str, object]:
    """Stores only the policy options that differ from the defaults, so that older checkpoints stay readable."""
    model = config.actor.model
    facts = _facts("actor.model", model, set() if model.type in INSTRUCTED else {"hidden_sizes", "activation"})
    chosen = {"type": "mlp", "log_std": "free", "action_distribution": "gaussian"}
    facts |= _facts("actor.model", model, {name for name, usual in chosen.items() if getattr(model, name) != usual})
    if model.type in ("cnn", "vla"):
        facts |= _facts("actor.model", model, {"cnn"})
    if model.type == "gru":
        facts |= _facts("actor.model", model, {"recurrent_size"})
    if model.type in INSTRUCTED:
        names = {"path", "random_init", "tokenizer", "instruction", "train_backbone"}
        names |= {"flow"} if model.type in FLOW_POLICIES else {"action_bins"}
        names |= set() if model.type == "vla" else {"unnorm_key", "train_vision"}
        names |= set() if model.backbone_layers is None else {"backbone_layers"}
        facts |= _facts("actor.model", model, names) | _adapters(config)
        if model.random_init is not None:
            facts["runner.seed"] = config.runner.seed  # checkpoints do not hold frozen parameters
    if config.env.pixels is not None:
        facts["env.pixels"] = config.env.pixels.model_dump()
    return facts


def _adapters(config: Config) -> dict[str, object]:
    """Returns the facts of adapters. Their checkpoints lack the base models, which must therefore be the same."""
    roles = ("actor", "critic") if config.critic.use_critic_model else ("actor",)
    facts: dict[str, object] = {}
    for role in roles:
        section: Trainable = getattr(config, role)
        if section.lora is None:
            continue
        facts[f"{role}.lora"] = section.lora.model_dump()
        if config.model_of(role).random_init is not None:
            facts["runner.seed"] = config.runner.seed
    return facts


def _facts(key: str, model: Model, names: set[str]) -> dict[str, object]:
    return {f"{key}.{name}": value for name, value in model.model_dump(include=names).items()}
