"""The door to this folder: what the core finds here by name, through `acceleration.find`.

Each function returns an accelerated implementation, or None where that does not cover the arguments. Modules are
imported when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from rl_platform.accel.bfloat16_training import Bfloat16Engine
    from rl_platform.accel.compiled_policy import CompiledPolicy
    from rl_platform.accel.compiled_training import CompiledEngine
    from rl_platform.accel.cuda_decode import CudaDecoding
    from rl_platform.accel.decode_kernel import CompiledDecodeAttention, PageTable
    from rl_platform.accel.packed_linear import PackedLinear
    from rl_platform.accel.row_kernels import CompiledRows
    from rl_platform.records import SamplingParams


def gae_function(values: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns `algorithms.gae.gae` as a compiled loop, for tensors of the device and type of `values`."""
    from rl_platform.accel.compiled_gae import compiled_gae, compiles

    return compiled_gae if compiles(values) else None


def training_engine_class(
    model: nn.Module, device: torch.device, dtype: torch.dtype
) -> type[CompiledEngine | Bfloat16Engine] | None:
    """Returns an `FSDPEngine` of one CPU: a compiled step of small Gaussian policies, bfloat16 products of a Llama."""
    from rl_platform.accel.bfloat16_training import Bfloat16Engine, trains_in_bfloat16
    from rl_platform.accel.compiled_training import CompiledEngine, compiles

    if trains_in_bfloat16(model, device, dtype):
        return Bfloat16Engine
    return CompiledEngine if compiles(model, device, dtype) else None


def recompute_tensors(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Lets a language model that trains in float32 on a CPU store less for its backward pass, with equal bits."""
    import torch

    backbone = _transformers_backbone(model)
    if device.type != "cpu" or dtype != torch.float32 or backbone is None:
        return
    from rl_platform.accel.recomputed_tensors import recompute_tensors as recompute

    recompute(backbone, backbone.config.model_type)


def fuse_layers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Fuses elementwise operations in the decoder layers of a large language model in half precision on a GPU."""
    import torch

    backbone = _transformers_backbone(model)
    if device.type == "cpu" or dtype == torch.float32 or backbone is None:
        return
    from rl_platform.accel.fused_layers import covers, fuse_layers

    if covers(backbone.config, device):
        fuse_layers(backbone, dtype)


def _transformers_backbone(model: nn.Module) -> PreTrainedModel | None:
    """Returns the backbone of a language model; None for embodied policies, whose backbone has no config."""
    backbone = getattr(getattr(model, "model", None), "backbone", None)
    return backbone if hasattr(backbone, "config") else None


def fastest_alone(engine: object, rows: int) -> bool:
    """Returns whether one thread steps through mini-batches of `rows` faster than several: of the compiled engine
    only."""
    from rl_platform.accel.compiled_training import CompiledEngine

    return isinstance(engine, CompiledEngine) and engine.fastest_alone(rows)


def policy_class(policy: nn.Module, device: torch.device) -> type[CompiledPolicy] | None:
    """Returns `ActorCriticPolicy.act` as compiled loops, for small policies on a CPU."""
    from rl_platform.accel.compiled_policy import CompiledPolicy, acts_compiled

    return CompiledPolicy if acts_compiled(policy, device) else None


def decode_attention() -> tuple[type[PageTable], type[CompiledDecodeAttention]] | None:
    """Returns `Readers` and `DecodeAttention` of rollout/paged_attention.py as one compiled loop, on a CPU."""
    if not _has_team():
        return None
    from rl_platform.accel.decode_kernel import CompiledDecodeAttention, PageTable  # imports numba, which takes 0.3 s

    return PageTable, CompiledDecodeAttention


def decoding_step(
    decoder: object, most_rows: int, device: torch.device, dtype: torch.dtype, *, graphs: bool
) -> CudaDecoding | None:
    """Returns decoding steps of at most `most_rows` sequences as CUDA graphs; None if they do not cover the decoder."""
    import torch

    if not _has_triton(device):
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):  # bfloat16 and asynchronous copies
        return None
    from rl_platform.accel.cuda_decode import CudaDecoding, decodes, flashes  # imports Triton

    if not decodes(decoder, dtype):
        return None
    from rl_platform.accel.cuda_check import agrees

    flash = flashes(device, dtype, decoder.layers[0].head_dim)
    if not agrees(decoder, device, dtype, flash=flash):
        return None
    return CudaDecoding(decoder, most_rows, device, graphs=graphs)


def row_operations(device: torch.device, dtype: torch.dtype) -> CompiledRows | None:
    """Returns `RowOperations` of engines/rollout/decoder.py as compiled loops: bfloat16, on a CPU."""
    if not (_has_team() and _is_bfloat16_on_a_cpu(device, dtype)):
        return None
    from rl_platform.accel.row_kernels import CompiledRows

    return CompiledRows()


def float32_head(head: nn.Linear, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Returns `head` with float32 outputs, which torch's products of bfloat16 round: bfloat16, on a CPU."""
    if not (head.bias is None and _is_bfloat16_on_a_cpu(device, dtype)):
        return None
    from rl_platform.accel.bfloat16_products import Float32Outputs

    return Float32Outputs(head)


def sampling_function(
    device: torch.device, dtype: torch.dtype, sampling: SamplingParams
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns `rollout.sampling.sample` as a compiled loop: bfloat16 weights on a CPU, neither top-k nor top-p."""
    filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
    if filtered or not (_has_team() and _is_bfloat16_on_a_cpu(device, dtype)):
        return None
    from rl_platform.accel.sampling_kernel import compiled_sample

    return compiled_sample


def _has_triton(device: torch.device) -> bool:
    """Returns whether Triton's kernels run on `device`; False on the pretended device of the tests."""
    import torch

    return device.type == "cuda" and torch.version.cuda is not None and find_spec("triton") is not None


def _has_team() -> bool:
    from rl_platform.accel.openmp_team import has_team

    return has_team()


def _is_bfloat16_on_a_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    import torch

    return device.type == "cpu" and dtype == torch.bfloat16


def log_probs_function(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None:
    """Returns `models.language.token_log_probs` with a backward pass of its own; None on CPUs."""
    if device.type == "cpu":
        return None
    from rl_platform.accel.fused_log_probs import fused_log_probs

    return fused_log_probs


def packed_linear_class(device: torch.device, dtype: torch.dtype) -> type[PackedLinear] | None:
    """Returns linear layers in oneDNN's blocked layout."""
    from rl_platform.accel.packed_linear import PackedLinear, can_pack

    return PackedLinear if can_pack(device, dtype) else None


def normalizing_loops() -> ModuleType:
    """Returns the running statistics of envs/embodied/normalize.py as compiled loops."""
    from rl_platform.accel import normalizing_loops as loops

    return loops


def wait_passively_when_crowded() -> Callable[[], None]:
    """Starts the thread of accel/crowded_cores.py; returns a function that ends it."""
    from rl_platform.accel.crowded_cores import wait_passively_when_crowded as start

    return start()
