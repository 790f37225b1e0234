"""Builds language models from the config. Equal sections and seeds give equal weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Lora, Model
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.families import readable_positions
from rl_platform.models.language import LanguageModel
from rl_platform.models.lora import add_adapters
from rl_platform.models.pretrained import load_causal_lm
from rl_platform.models.probe import own_forward, probe
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.rng import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def language_model(
    config: Config,
    section: Model,
    seed: int,
    *,
    value_head: bool = False,
    lora: Lora | None = None,
    probed: bool = False,
) -> LanguageModel:
    """Returns the language model of `section`.

    Actor, critic and reference with one section and seed start from equal backbones, also with random weights. With
    `lora` only the adapters and a value head are trained. `probed`: a loaded model is compared with transformers, see
    `probe`.

    Raises ConfigError if there is nothing to load, if the model reads fewer positions than `data` allows, or if it has
    no layer for the adapters. Raises DataError if the comparison fails.
    """
    own = {"critic.model": config.critic.model, "reference.model": config.reference.model}
    key = next((name for name, model in own.items() if model is section), "actor.model")
    tokenizer = load_tokenizer(section, key)
    network = load_causal_lm(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0], derive_seed(seed, "model"), key)
    if (problem := length_problem(config, network.config, key)) is not None:
        raise ConfigError([problem])
    language = LanguageModel(network, value_head=value_head)
    if probed and section.path is not None:
        probe(network, partial(own_forward, network, language), section.path, f"{key}.path")
    if lora is not None:
        add_adapters(language.backbone, lora, derive_seed(seed, "lora"), "critic.lora" if value_head else "actor.lora")
        language.head.requires_grad_(value_head)
    return language


def length_problem(config: Config, model_config: PretrainedConfig, key: str) -> Problem | None:
    """Returns a problem if `data` allows longer sequences than the model of `key` reads."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    positions = readable_positions(model_config) or longest
    if longest <= positions:
        return None
    message = f"prompt and response together may have {longest} tokens, the model of {key} reads {positions}"
    allowed = f"data.max_prompt_length + data.max_response_length up to {positions}"
    return Problem("data.max_response_length", message, allowed=allowed)


def token_temperature(config: Config) -> float:
    """Returns the sampling temperature, by which training divides logits; 1 for greedy decoding."""
    return config.rollout.sampling.temperature or 1.0
