"""Maps parameters of a Megatron model to Hugging Face tensors, and ranks to the parts that they hold.

Used for parameters and for the moments of their optimizer. Covers the families of `supported`. A rank's parameter may
interleave rows of several tensors, and its optimizer may hold any slice of the flattened parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from rl_platform.engines.training.megatron.supported import is_latent
from rl_platform.engines.training.sharded_state import Offsets
from rl_platform.models.adapters.lora import ADAPTER, BASE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = Sequence[int]
Sharing = Literal["replicated", "columns", "rows", "qkv", "gate_up", "experts"]
_ADAPTERS = ".adapters."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_LAYER: dict[str, tuple[Sharing, tuple[str, ...]]] = {
    "input_layernorm.weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"self_attn.{name}_proj.weight" for name in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"self_attn.{name}_proj.bias" for name in "qkv")),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("replicated", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("replicated", ("post_attention_layernorm.weight",)),
    # Transformer Engine's linear layers include the norm of their input.
    "self_attention.linear_qkv.layer_norm_weight": ("replicated", ("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("replicated", ("mlp.gate.weight",)),
    "mlp.router.correction": ("replicated", ("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": (
        "gate_up",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    "mlp.shared_experts.linear_fc2.weight": ("columns", ("mlp.shared_experts.down_proj.weight",)),
    "mlp.shared_experts.gate_weight": ("replicated", ("mlp.shared_expert_gate.weight",)),
    "mlp.experts.gate_up": ("experts", ("mlp.experts.gate_up_proj",)),
    "mlp.experts.down": ("experts", ("mlp.experts.down_proj",)),
}
_OF_LATENT_ATTENTION: dict[str, tuple[Sharing, tuple[str, ...]]] = {
    "self_attention.linear_q_proj.weight": ("rows", ("self_attn.q_proj.weight",)),
    "self_attention.linear_q_down_proj.weight": ("replicated", ("self_attn.q_a_proj.weight",)),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": ("rows", ("self_attn.q_b_proj.weight",)),
    "self_attention.linear_kv_down_proj.weight": ("replicated", ("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.kv_layernorm.weight": ("replicated", ("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": ("rows", ("self_attn.kv_b_proj.weight",)),
}
_OF_MODEL: dict[str, tuple[Sharing, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("rows", ("model.backbone.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("replicated", ("model.backbone.norm.weight",)),
}


@dataclass(frozen=True)
class TensorSource:
    """The names of the tensors that a Megatron parameter consists of, and how ranks split it.

    The ranks are expert-parallel if `sharing` is "experts", else tensor-parallel.
    """

    names: tuple[str, ...]
    sharing: Sharing
    key_heads: int
    head_size: int


def source_of(name: str, first_layer: int, config: PretrainedConfig, *, value_head: bool) -> TensorSource:
    """Returns the source of parameter `name` of a pipeline stage that begins with layer `first_layer` of the model.

    `config`: the transformers config. Names are those of the platform's models (`model.backbone...`).
    """
    if _ADAPTERS in name:
        linear, _, which = name.partition(_ADAPTERS)
        matrix, _, index = which.partition(".")
        return _of_adapter(
            source_of(f"{linear}.weight", first_layer, config, value_head=value_head), matrix, int(index)
        )
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        of_layer = _OF_LAYER | _OF_LATENT_ATTENTION if is_latent(config) else _OF_LAYER
        sharing, names = of_layer[layer[2]]
        if config.model_type == "qwen2_moe":
            names = tuple(part.replace("shared_experts.", "shared_expert.") for part in names)
        names = tuple(f"model.backbone.layers.{first_layer + int(layer[1])}.{part}" for part in names)
    elif name.startswith("output_layer."):
        sharing, names = "replicated" if value_head else "rows", (f"model.head.{name.rpartition('.')[2]}",)
    else:
        sharing, names = _OF_MODEL[name]
    return TensorSource(names, sharing, config.num_key_value_heads, head_size(config))


def _of_adapter(linear: TensorSource, matrix: str, part: int) -> TensorSource:
    """Returns the source of matrix A ("down") or B ("up") of the adapter of a part of a linear layer."""
    if matrix == "down":
        sharing: Sharing = "columns" if linear.sharing == "columns" else "replicated"
    else:
        sharing = "replicated" if linear.sharing in ("columns", "replicated") else "rows"
    name = adapter_name(linear.names[part], "A" if matrix == "down" else "B")
    return replace(linear, names=(name,), sharing=sharing)


def adapter_name(weight: str, matrix: Literal["A", "B"]) -> str:
    """Returns peft's name of a matrix of the adapter beside `weight`."""
    return f"{weight.removesuffix('weight')}lora_{matrix}.{ADAPTER}.weight"


def base_name(weight: str) -> str:
    """Returns peft's name of a parameter of a linear layer with an adapter."""
    layer, _, last = weight.rpartition(".")
    return f"{layer}{BASE}{last}"


def split(source: TensorSource, rank: int, shape: Shape, whole: Sequence[Tensor]) -> Tensor:
    """Returns the parameter of a rank, of this shape, from the whole tensors. Padding of the vocabulary is 0."""
    part = whole[0].new_zeros(tuple(shape))
    for index, offsets, view in placed(source, rank, shape, [tensor.shape for tensor in whole], part):
        view.copy_(_box(whole[index], offsets, view.shape))
    return part


def join(source: TensorSource, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """Returns the whole tensors, of these shapes, from the parameters of all ranks."""
    whole = [parts[0].new_empty(tuple(shape)) for shape in shapes]
    for rank, part in enumerate(parts):
        for index, offsets, view in placed(source, rank, part.shape, shapes, part):
            _box(whole[index], offsets, view.shape).copy_(view)
    return whole


def _box(whole: Tensor, offsets: Offsets, sizes: Shape) -> Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]


@dataclass(frozen=True)
class RowRange:
    """Rows [local, local + rows) of a parameter are rows [first, first + rows) of tensor `index` of its source."""

    index: int
    local: int
    first: int
    rows: int


def placed(
    source: TensorSource, rank: int, shape: Shape, whole: Sequence[Shape], values: Tensor, start: int = 0
) -> Iterator[tuple[int, Offsets, Tensor]]:
    """Yields the parts of `values` as (index of the tensor in `source`, offsets in it, view).

    shape: of the parameter of `rank`, one of the ranks that share the source; whole: shapes of the source's tensors;
    values: elements of the flattened parameter from `start` on. Padding of the vocabulary belongs to no tensor.
    """
    values = values.reshape(-1)
    runs = _runs(source, rank, shape[0], whole)
    column = rank * shape[1] if source.sharing == "columns" else 0
    done = 0
    for (row, *others), (rows, *sizes) in boxes(shape, start, start + len(values)):
        if others:
            others[0] += column
        width = math.prod(sizes)
        for run in runs:
            low, high = max(row, run.local), min(row + rows, run.local + run.rows)
            if low < high:
                part = values[done + (low - row) * width : done + (high - row) * width]
                yield run.index, (run.first + low - run.local, *others), part.view(high - low, *sizes)
        done += rows * width


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
    """Yields the elements [start:stop] of a flattened tensor as boxes (offsets, sizes), in order.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    row, within = divmod(start, inner)
    if within or stop - start < inner:  # a part of a row
        end = min(stop, (row + 1) * inner)
        for offsets, sizes in boxes(shape[1:], within, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        yield from boxes(shape, end, stop)
        return
    rows = (stop - start) // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from boxes(shape, start + rows * inner, stop)


def _runs(source: TensorSource, rank: int, rows: int, whole: Sequence[Shape]) -> list[RowRange]:
    match source.sharing:
        case "replicated" | "columns":
            return [RowRange(0, 0, 0, rows)]
        case "gate_up":
            half = rows // 2
            return [RowRange(index, index * half, rank * half, half) for index in range(2)]
        case "qkv":  # for each key head its queries, the key, the value
            queries, size = whole[0][0] // source.key_heads, source.head_size
            together = queries + 2 * size
            runs = []
            for number in range(rows // together):
                head, local = rank * (rows // together) + number, number * together
                runs.append(RowRange(0, local, head * queries, queries))
                runs.append(RowRange(1, local + queries, head * size, size))
                runs.append(RowRange(2, local + queries + size, head * size, size))
            return runs
        case _:  # consecutive equal shares; the last ones may have padding
            first = rank * rows
            return [RowRange(0, 0, first, min(rows, whole[0][0] - first))]


def head_size(config: PretrainedConfig) -> int:
    """Returns the number of channels of an attention head, from a transformers config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def padded(vocabulary: int, tensor_size: int) -> int:
    """Returns `vocabulary` rounded up to a multiple of `tensor_size`. Rows beyond the vocabulary are never read."""
    return -(-vocabulary // tensor_size) * tensor_size
