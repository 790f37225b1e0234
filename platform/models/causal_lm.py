"""Causal language models of transformers: with random weights, or read by `pretrained/`; their export to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_platform.config.schema.models import Model, RandomLM
from rl_platform.extras import required

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rl_platform.models.tokenizer import Tokenizer

PRETRAINED = "rl_platform.models.pretrained"


def load_config(model: Model, vocab_size: int, eos_token_id: int, key: str = "actor.model") -> PretrainedConfig:
    """Returns the transformers config of a language model: from its folder, or a small Llama for `random_init`.

    Raises ConfigError if there is none, or for an architecture or weights that the platform does not compute with.
    """
    if model.random_init is None:
        with required(PRETRAINED, f"{key}.path"):
            from rl_platform.models.pretrained.pretrained_lm import read_config
        return read_config(model.path or "", f"{key}.path")
    from transformers import LlamaConfig

    tiny: RandomLM = model.random_init
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads or tiny.num_heads,
        max_position_embeddings=tiny.max_positions,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
    )


def load_causal_lm(model: Model, vocab_size: int, eos_token_id: int, seed: int, key: str = "actor.model") -> nn.Module:
    """Returns a transformers causal LM in float32. Random weights depend on `seed` only. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    config = load_config(model, vocab_size, eos_token_id, key)
    with quiet_transformers():
        if model.random_init is None:
            from rl_platform.models.pretrained.model_folder import model_folder
            from rl_platform.models.pretrained.pretrained_lm import read_causal_lm

            network: nn.Module = read_causal_lm(model_folder(model.path or "", f"{key}.path"), config, f"{key}.path")
            return network
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            return network


def meta_causal_lm(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the model of a transformers config on the meta device, which takes no memory."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.tie_weights()  # creation without memory has untied them
    return network


def export_causal_lm(
    weights: dict[str, torch.Tensor], config: PretrainedConfig, tokenizer: Tokenizer, folder: Path
) -> None:
    """Writes `weights` in float32, named as in `language.LanguageModel`, and the tokenizer as a Hugging Face folder.

    A head that is tied to the embeddings may be missing. The generation config names every token that ended a response:
    many chat models end a turn with another token than config.json names.
    """
    from transformers import GenerationConfig

    with quiet_transformers():
        network = meta_causal_lm(config)  # random weights of 135M parameters would take 3 s
        whole = {name: tensor.to("cpu", torch.float32) for name, tensor in weights.items()}
        prefix = "backbone."
        state = {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
        network.base_model.load_state_dict(state, assign=True)
        if "head.weight" in whole:
            network.get_output_embeddings().weight = nn.Parameter(whole["head.weight"], requires_grad=False)
        network.tie_weights()
        ends = list(tokenizer.eos_token_ids)
        network.generation_config = GenerationConfig.from_model_config(network.config)
        network.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
        network.save_pretrained(folder)
    tokenizer.save(folder)


class quiet_transformers:
    """Context manager that silences transformers' progress bars and warnings."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.verbosity, self.bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.verbosity)
        if self.bars:
            logging.enable_progress_bar()
