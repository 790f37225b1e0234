"""Builds language models from the config. Equal sections and seeds give equal weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Lora, Model
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.causal_lm import load_causal_lm, load_config
from rl_platform.models.language import LanguageModel
from rl_platform.models.tokenizer import Tokenizer, load_tokenizer
from rl_platform.records import Prompt
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
    `lora` only the adapters and a value head are trained. Several ranks, each of which trains a part of the model, get
    it on the meta device, see `LanguageModel.pretrained`. `probed`: a loaded model, or its first layers, is compared
    with transformers, see `probe`.

    Raises ConfigError if there is nothing to load, if the model reads fewer positions than `data` allows, or if it has
    no layer for the adapters. Raises DataError if the comparison fails.
    """
    own = {"critic.model": config.critic.model, "reference.model": config.reference.model}
    key = next((name for name, model in own.items() if model is section), "actor.model")
    tokenizer = load_tokenizer(section, key)
    loading = section, tokenizer.vocab_size, tokenizer.eos_token_ids[0]
    model_config = load_config(*loading, key)
    if (problem := length_problem(config, model_config, key)) is not None:
        raise ConfigError([problem])
    if lora is None and section.path is not None and _several_ranks():
        from rl_platform.models.pretrained.weight_parts import model_in_parts

        in_parts = model_in_parts(section.path, model_config, f"{key}.path", value_head=value_head, probed=probed)
        if in_parts is not None:
            return in_parts
    network = load_causal_lm(*loading, derive_seed(seed, "model"), key)
    language = LanguageModel(network, value_head=value_head)
    if probed and section.path is not None:
        from rl_platform.models.pretrained.folder_files import reading
        from rl_platform.models.pretrained.probe import own_forward, probe

        with reading(f"{key}.path", "computes nothing", section.path):
            probe(network, partial(own_forward, network, language), section.path, f"{key}.path")
    if lora is not None:
        from rl_platform.models.adapters.lora import add_adapters

        add_adapters(language.backbone, lora, derive_seed(seed, "lora"), "critic.lora" if value_head else "actor.lora")
        language.head.requires_grad_(value_head)
    return language


def length_problem(config: Config, model_config: PretrainedConfig, key: str) -> Problem | None:
    """Returns a problem if `data` allows longer sequences than the model of `key` reads."""
    longest = config.data.longest_sequence
    positions = readable_positions(model_config) or longest
    if longest <= positions:
        return None
    message = f"prompt and response together may have {longest} tokens, the model of {key} reads {positions}"
    allowed = f"data.max_prompt_length + data.max_response_length up to {positions}"
    return Problem("data.max_response_length", message, allowed=allowed)


def check_vocabulary(config: Config, tokenizer: Tokenizer, prompts: Iterable[Prompt]) -> None:
    """Raises ConfigError if a prompt holds a token that the actor's model does not have, or if no response could end.

    A tokenizer may have more tokens than its model, as Gemma 3's, as long as no prompt holds them.
    """
    size = load_config(config.actor.model, tokenizer.vocab_size, tokenizer.eos_token_ids[0]).vocab_size
    largest = max((token for prompt in prompts for token in prompt.token_ids), default=0)
    end = min(tokenizer.eos_token_ids)
    if max(largest, end) < size:
        return
    token, place = (largest, "prompts hold") if largest >= size else (end, "responses end with")
    text = json.dumps(tokenizer.decode([token], special=True), ensure_ascii=False)
    message = f"{place} the token {token}, {text}, and the model has tokens 0 to {size - 1} only"
    hint = "the tokenizer of this model, or model.resize_token_embeddings(len(tokenizer)) before the model is saved"
    key = "actor.model.path" if config.actor.model.tokenizer is None else "actor.model.tokenizer"
    raise ConfigError([Problem(key, message, hint=hint)])


def readable_positions(config: PretrainedConfig) -> int | None:
    """Returns the largest number of tokens of a sequence; None for a model without a limit.

    Long rotary positions (LongRoPE) change for all sequences of a batch when one of them passes the original limit;
    training and generation have other batches, so that limit counts.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        original = rotary.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        if original:
            return int(original)
    return getattr(config, "max_position_embeddings", None)


def _several_ranks() -> bool:
    return bool(dist.is_initialized() and dist.get_world_size() > 1)


def token_temperature(config: Config) -> float:
    """Returns the sampling temperature, by which training divides logits; 1 for greedy decoding."""
    return config.rollout.sampling.temperature or 1.0
