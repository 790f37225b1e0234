"""Tiny random language models of several architectures, and batches of token sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.models.language import LanguageModel
from rl_platform.records import RolloutBatch

VOCABULARY = 61


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def causal_lm() -> Callable[..., Any]:
    """`causal_lm("qwen2")`: a transformers model with 4 query heads on 2 key heads and no weight near zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def build(kind: str = "llama", seed: int = 0, **options: Any) -> Any:
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "tie_word_embeddings": kind == "llama",
        }
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | options)).eval()
        for parameter in model.parameters():  # biases start at 0, norms at 1: errors there would not show
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    return build


@pytest.fixture
def both(causal_lm: Callable[..., Any]) -> Callable[..., tuple[Any, LanguageModel]]:
    """The same weights as transformers runs them and as the platform runs them."""

    def build(kind: str = "llama", *, value_head: bool = False) -> tuple[Any, LanguageModel]:
        plain = causal_lm(kind)
        return plain, LanguageModel(copy.deepcopy(plain), value_head=value_head)

    return build


@pytest.fixture
def token_batch() -> Callable[..., RolloutBatch]:
    """`token_batch(sequences, prompts, padding)`: sequences of which the first `prompts[b]` tokens were not sampled."""

    def build(sequences: Sequence[Sequence[int]], prompts: Sequence[int], padding: int = 0) -> RolloutBatch:
        shape = (len(sequences), max(len(sequence) for sequence in sequences) + padding)
        tokens, mask = torch.full(shape, VOCABULARY - 1), torch.zeros(shape, dtype=torch.bool)
        for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, prompt : len(sequence)] = True
        return neutral_batch(
            mask, inputs={"tokens": tokens, "lengths": torch.tensor([len(sequence) for sequence in sequences])}
        )

    return build


@pytest.fixture
def gradients() -> Callable[[torch.nn.Module], dict[str, Tensor]]:
    """Gradients by parameter name, without the prefixes in which transformers and the platform differ."""

    def collect(model: torch.nn.Module) -> dict[str, Tensor]:
        by_name = {}
        for name, parameter in model.named_parameters():
            short = name.removeprefix("model.").removeprefix("model.").removeprefix("backbone.")
            by_name[short.replace("lm_head.", "head.")] = parameter.grad
        return by_name

    return collect
