"""Builds policies on vision-language models of transformers: from a folder, or tiny ones with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model, RandomLM
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.folder_files import check_options, check_weights, reading
from rl_platform.models.pretrained import model_folder, quiet_transformers
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.models.vlas.flow_policy import FlowPolicy
from rl_platform.models.vlas.inputs import ActionRange, action_range

if TYPE_CHECKING:
    from transformers import PI0Config, PretrainedConfig, PreTrainedModel

RANDOM_IMAGE, RANDOM_PATCH = 64, 16  # pixels, of models with random weights
_PATH = "actor.model.path"


def build(model: Model, spaces: EnvSpaces, levels: ActionLevels, seed: int, instructions: Sequence[str]) -> FlowPolicy:
    """Returns the policy of section `model`. Random weights depend on `seed`, new parameters on torch's generator.

    Raises ConfigError if there is nothing to load, or if the spaces do not fit the model.
    """
    tokenizer = load_tokenizer(model)
    config = pi0_config(model, spaces, levels, tokenizer.vocab_size)
    counted = torch.get_default_device().type == "meta"  # without memory, before a run
    network = _read(model.path, config) if model.path and not counted else _random(config, seed)
    tokens = [torch.tensor(tokenizer.encode(f"{text}\n")) for text in instructions]  # the line ends as in training
    policy = FlowPolicy(network, tokens, spaces, model.flow, levels, action_range(model, spaces))
    if not model.train_backbone:
        policy.network.model.vlm.requires_grad_(False)
    return policy


def without_weights(
    model: Model, spaces: EnvSpaces, levels: ActionLevels, config: Mapping[str, object], lengths: Sequence[int]
) -> FlowPolicy:
    """Returns a policy whose parameters are to be loaded. config: of its network; lengths: tokens of each
    instruction."""
    from transformers import AutoConfig

    network = _random(AutoConfig.for_model(**config), 0)
    tokens = [torch.zeros(length, dtype=torch.int64) for length in lengths]
    unknown = [0.0] * spaces.action.size
    return FlowPolicy(network, tokens, spaces, model.flow, levels, ActionRange(unknown, unknown))


def pi0_config(model: Model, spaces: EnvSpaces, levels: ActionLevels, vocabulary: int) -> PI0Config:
    """Returns the transformers config of section `model`. Raises ConfigError if the spaces do not fit it."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if "pi0" not in CONFIG_MAPPING_NAMES:
        message = f"transformers {__version__} has no pi0"
        hint = "pip install --upgrade transformers; 5.19 has it"
        raise ConfigError([Problem("actor.model.type", message, value="pi0", hint=hint)])
    numbers = 0 if spaces.images else spaces.observation_size
    if model.random_init is not None:
        return _random_config(model.random_init, numbers, levels.num_actions, spaces.action.size, vocabulary)
    folder = model_folder(model.path or "", _PATH)
    check_options(folder, _PATH)
    with reading(_PATH, "cannot be loaded", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type != "pi0":
        message = f"a model of type {config.model_type} is no pi0"
        raise ConfigError([Problem(_PATH, message, value=folder, hint=f"actor.model.type: {_fitting(config)}")])
    fits = {
        "actor.model.num_action_chunks": (levels.num_actions, config.chunk_size, "actions in a chunk"),
        "env.id": (spaces.action.size, config.max_action_dim, "numbers in an action"),
        _PATH: (numbers, config.max_state_dim, "numbers in an observation"),
    }
    problems = [
        Problem(key, f"the model of {folder} has at most {most} {what}", value=str(count), allowed=f"1..{most}")
        for key, (count, most, what) in fits.items()
        if count > most
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _fitting(config: PretrainedConfig) -> str:
    return "vla, which reads language models" if not hasattr(config, "vision_config") else "vlm_tokens"


def _random_config(tiny: RandomLM, numbers: int, actions: int, width: int, vocabulary: int) -> PI0Config:
    from transformers import PI0Config

    sizes = {
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
    }
    gemma = {
        **sizes,
        "model_type": "gemma",
        "num_key_value_heads": tiny.num_kv_heads or tiny.num_heads,
        "head_dim": tiny.hidden_size // tiny.num_heads,
        "max_position_embeddings": tiny.max_positions,
        "vocab_size": vocabulary,
    }
    vision = {
        **sizes,
        "model_type": "siglip_vision_model",
        "image_size": RANDOM_IMAGE,
        "patch_size": RANDOM_PATCH,
        "vision_use_head": False,
    }
    return PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": gemma,
            "vision_config": vision,
            "projection_dim": tiny.hidden_size,
            "image_token_id": vocabulary - 1,  # the prefix is embedded here, so no token stands for an image
        },
        dit_config=dict(gemma),
        chunk_size=actions,
        max_state_dim=max(numbers, 1),
        max_action_dim=width,
    )


def _random(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    from transformers import PI0ForConditionalGeneration

    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PI0ForConditionalGeneration(config).float()


def _read(path: str, config: PretrainedConfig) -> PreTrainedModel:
    from transformers import PI0ForConditionalGeneration

    folder = model_folder(path, _PATH)
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    with quiet_transformers(), reading(_PATH, "cannot be loaded", folder):
        network, loading = PI0ForConditionalGeneration.from_pretrained(folder, **options)
        check_weights(network, loading["missing_keys"], loading["unexpected_keys"], folder, _PATH)
    return network
