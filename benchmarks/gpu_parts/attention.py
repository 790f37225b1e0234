"""Attention over packed rows: time and TFLOP/s by length and shared prefix."""

from __future__ import annotations

import torch

from gpu_parts.part import Report, Setup
from rl_platform.models.packed import pack

TOKENS = 16_384  # of a pass, in rows of equal length
LENGTHS, PREFIXES = (1024, 4096, 8192), (0, 2, 256, 1024)
HEADS, KEY_HEADS, WIDTH = 12, 2, 128  # of Qwen2.5-1.5B


def measure(setup: Setup, report: Report) -> None:
    """Reports TFLOP/s of a forward and backward pass. Counts only pairs that attend to each other, a prefix once."""
    tokens, lengths, prefixes = (64, (16,), (0, 2)) if setup.small else (TOKENS, LENGTHS, PREFIXES)
    for length in lengths:
        for prefix in (prefix for prefix in prefixes if prefix < length):
            seconds, flops = one(setup, tokens // length, length, prefix)
            name = f"rows of {length:,} tokens, {f'{prefix:,} of them shared' if prefix else 'nothing shared'}"
            report(f"{name}: forward and backward", 1e3 * seconds, "ms")
            report.rate(name, flops / 1e12, seconds, "TFLOP/s")


def one(setup: Setup, rows: int, length: int, prefix: int) -> tuple[float, float]:
    """Returns seconds and FLOPs of one layer's attention."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, (rows, length), generator=draw)
    tokens[:, :prefix] = tokens[0, :prefix]
    tokens[:, prefix] = torch.arange(rows)  # rows differ from here on
    packed = pack(list(tokens), setup.device)
    dtype = torch.float32 if setup.small else torch.bfloat16
    options = {"device": setup.device, "dtype": dtype, "requires_grad": True}
    count = packed.tokens.shape[0]
    query = torch.randn(1, HEADS, count, WIDTH, **options)
    key, value = (torch.randn(1, KEY_HEADS, count, WIDTH, **options) for _ in range(2))

    def step() -> None:
        packed.attention(0, query, key, value, WIDTH**-0.5, None).sum().backward()

    rest = length - prefix
    pairs = prefix**2 / 2 + rows * (rest * prefix + rest**2 / 2)
    # scores and sums of values, 2 operations per multiply-add; a backward pass counts as two and a half forward passes
    return setup.seconds(step), 3.5 * 2 * 2 * pairs * HEADS * WIDTH
