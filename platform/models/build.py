"""From config to language model: the same weights for everyone who asks with the same section and seed."""

from __future__ import annotations

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Lora, Model
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.language import LanguageModel
from rl_platform.models.lora import add_adapters
from rl_platform.models.pretrained import load_causal_lm
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.rng import derive_seed


def language_model(
    config: Config, section: Model, seed: int, *, value_head: bool = False, lora: Lora | None = None
) -> LanguageModel:
    """Actor, critic and reference built from one section start from equal backbones, also with random weights. With
    `lora` all but its adapters and a value head is frozen.

    Raises ConfigError when there is nothing to load, when the model cannot read sequences as long as `data` allows, or
    when it has no place for the adapters.
    """
    own = {"critic.model": config.critic.model, "reference.model": config.reference.model}
    key = next((name for name, model in own.items() if model is section), "actor.model")
    tokenizer = load_tokenizer(section, key)
    network = load_causal_lm(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0], derive_seed(seed, "model"), key)
    longest = config.data.max_prompt_length + config.data.max_response_length
    positions = getattr(network.config, "max_position_embeddings", longest)
    if longest > positions:
        message = f"prompt and response together may have {longest} tokens, the model of {key} reads {positions}"
        allowed = f"data.max_prompt_length + data.max_response_length up to {positions}"
        raise ConfigError([Problem("data.max_response_length", message, allowed=allowed)])
    language = LanguageModel(network, value_head=value_head)
    if lora is not None:
        add_adapters(language.backbone, lora, derive_seed(seed, "lora"), "critic.lora" if value_head else "actor.lora")
        language.head.requires_grad_(value_head)
    return language


def token_temperature(config: Config) -> float:
    """What logits are divided by in training: the temperature the tokens were sampled at (greedy counts as 1)."""
    return config.rollout.sampling.temperature or 1.0
