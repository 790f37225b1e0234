"""What a machine could generate at most: how fast it reads memory and multiplies matrices, and what the model needs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from _common import Lap, Turns


def measure_rates(turns: Turns, settings: argparse.Namespace) -> None:
    """A contestant: every lap measures both rates, with `settings.count` sequences."""
    import torch

    from rl_platform.accel.packed_linear import PackedLinear

    layer = torch.nn.Linear(576, 3072, bias=False)  # stays in the cache
    product, states, memory = PackedLinear([layer]), torch.randn(settings.count, 576), torch.ones(2**26)

    def fastest(call: Callable[[], Any], repeats: int) -> float:
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return min(found)

    turns.next()
    with torch.inference_mode():
        while True:
            flops = 2 * settings.count * layer.weight.numel() / fastest(lambda: product(states), 300)
            turns.next({"flops": flops, "bandwidth": memory.nbytes / fastest(memory.sum, 10)})


def tokens_at_limit(folder: str, laps: Sequence[Lap], wanted: Sequence[tuple[Sequence[int], int]]) -> float:
    """Tokens per second of the model in `folder` (float32), for prompts and numbers of new tokens."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * heads * config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    new = sum(tokens for _, tokens in wanted)
    products = 2 * (layers * (new + sum(len(prompt) for prompt, _ in wanted)) + head * new)
    read = 4 * (layers + head) * max(tokens for _, tokens in wanted)
    flops, bandwidth = (max(lap.numbers[name] for lap in laps) for name in ("flops", "bandwidth"))
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s, matrices are multiplied at {flops / 1e9:.0f} GFLOP/s")
    return new / max(products / flops, read / bandwidth)
