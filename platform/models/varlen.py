"""Causal attention of packed sequences by one flash attention kernel: no padding, no masks, no repeated key heads.

Only half precision on a GPU has such a kernel; `packed.PackedAttention` computes everything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rl_platform.device_copy import on_device
from rl_platform.models.attention import PLAIN, Features

HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
REQUIRED = {"scale", "window_size"}


class VarlenAttention:
    """Every sequence attends to the shared prefix and to itself. lengths: tokens of each sequence after the prefix.

    The queries of a sequence are its own tokens; its keys are the prefix and its own tokens. Flash attention aligns
    both at their ends, so query i of n attends to all but the last n - 1 - i keys. A separate attention to the prefix,
    merged by the log-sum-exp, would not copy the prefix's keys. It is not used, because torch's backward pass drops the
    gradient of the log-sum-exp.
    """

    def __init__(self, prefix: int, lengths: Sequence[int], device: torch.device) -> None:
        queries = [prefix, *lengths] if prefix else list(lengths)
        keys = [prefix, *(prefix + length for length in lengths)] if prefix else queries
        self.longest_queries, self.longest_keys = max(queries), max(keys)
        indices = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)]
        if prefix:
            shared = torch.arange(prefix)
            own = torch.arange(prefix, prefix + sum(lengths)).split(list(lengths))
            indices.append(torch.cat([shared, *(part for tokens in own for part in (shared, tokens))]))
        self.query_ends, self.key_ends, *rest = on_device(indices, device)
        self.key_index = rest[0] if rest else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None) -> Tensor:
        """Returns [N,Hq,D] of query [1,Hq,N,D], key and value [1,Hkv,N,D], all of one half precision."""
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.key_index is not None:
            keys, values = (tensor.index_select(0, self.key_index) for tensor in (keys, values))
        ends = (self.query_ends, self.longest_queries), (self.key_ends, self.longest_keys)
        return flash_attention(queries, keys, values, *ends, scaling, window)


def flash_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_ends: tuple[Tensor, int],
    key_ends: tuple[Tensor, int],
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """queries [N,Hq,D], keys and values [M,Hkv,D] of several sequences, in half precision -> [N,Hq,D].

    query_ends, key_ends: cumulative lengths [sequences + 1] int32 on the device, and the greatest length. The last
    query of a sequence attends to all its keys.
    """
    from torch.nn.attention import varlen

    # query heads share key heads; torch 2.11 has no parameter for it, and its kernel does it without one
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in kernel_parameters() else {}
    out = varlen.varlen_attn(
        queries.contiguous(),
        keys.contiguous(),
        values.contiguous(),
        query_ends[0],
        key_ends[0],
        query_ends[1],
        key_ends[1],
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)  # a tuple with return_aux only
    return out


def half_precision(
    query: Tensor, key: Tensor, value: Tensor, features: Features | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the tensors in the precision of the kernel; None if the kernel does not support them."""
    if not query.is_cuda:
        return None
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    features = features or PLAIN
    if dtype not in HALF or features.softcap is not None or features.sinks is not None:
        return None
    if value.shape[-1] != query.shape[-1] or not has_kernel(query.device, query.shape[-1]):
        return None
    return query.to(dtype), key.to(dtype), value.to(dtype)


def has_kernel(device: torch.device, width: int) -> bool:
    """Returns whether a GPU has the kernel for heads of this width."""
    available = torch.backends.cuda.is_flash_attention_available() and kernel_parameters() >= REQUIRED
    return available and width <= WIDEST_HEAD and width % 8 == 0 and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def kernel_parameters() -> frozenset[str]:
    """Returns the parameters of torch's kernel: none before torch 2.10, no `scale` in 2.10, no `enable_gqa` in 2.11."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)
