"""Low-rank adapters beside Megatron's linear layers, with the names and values of peft's adapters in `models.lora`.

A fused layer (queries, keys and values; gate and up) has an adapter for each of its parts, so names and shapes of a
checkpoint do not depend on the backend. Column-parallel layers split B, row-parallel layers split A, as they split
their own matrix. Experts have no adapters, because transformers keeps them in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn

from rl_platform.engines.training.megatron.weight_map import TensorSource, adapter_name, base_name
from rl_platform.models.adapters.lora import ADAPTER

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from peft.tuners.tuners_utils import BaseTunerLayer


class Adapters(nn.Module):
    """Adapters of the parts of a linear layer: input [...,in] -> what they add to the output [...,out].

    `whole`: all tensors of the model by name; `layer`: a layer of peft, with the factor of B A x and the switch of all
    adapters.
    """

    def __init__(
        self, source: TensorSource, whole: Mapping[str, Tensor], layer: BaseTunerLayer, config: TransformerConfig
    ) -> None:
        super().__init__()
        ranks, dtype, self.sharing = config.tensor_model_parallel_size, config.params_dtype, source.sharing
        self.sequence, self.key_heads = config.sequence_parallel, source.key_heads // ranks
        self.layer = (layer,)  # in a tuple, so that it is no submodule
        columns = ranks if self.sharing == "columns" else 1
        rows = 1 if self.sharing in ("columns", "replicated") else ranks
        self.widths: list[int] = []
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for index, name in enumerate(source.names):
            own = whole[name] if name in whole else whole[base_name(name)]
            self.widths.append(len(own) // rows)
            if (down := whole.get(adapter_name(name, "A"))) is not None:
                self.down[str(index)] = _matrix((len(down), down.shape[1] // columns), dtype, split=columns > 1)
                self.up[str(index)] = _matrix((self.widths[-1], len(down)), dtype, split=rows > 1)
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence and not parameter.tensor_model_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        low = F.linear(hidden, torch.cat([*self.down.values()]))
        if self.sharing == "columns":
            low = _reduced(low, self.sequence)
        elif self.sharing != "replicated":
            low = _shared(low, self.sequence)
        (layer,) = self.layer
        scaled = (low * layer.scaling[ADAPTER]).tensor_split(len(self.down), dim=-1)
        added = {int(index): F.linear(part, self.up[index]) for index, part in zip(self.up, scaled, strict=True)}
        nothing = low.new_zeros(())
        parts = [
            added[index] if index in added else nothing.expand(*low.shape[:-1], width)
            for index, width in enumerate(self.widths)
        ]
        if self.sharing == "qkv":  # for each key head its queries, the key, the value
            return torch.cat([part.unflatten(-1, (self.key_heads, -1)) for part in parts], dim=-1).flatten(-2)
        return torch.cat(parts, dim=-1)

    @property
    def enabled(self) -> bool:
        return not self.layer[0].disable_adapters


def add_adapters(stage: GPTModel, source_of: Callable[[str], TensorSource], model: nn.Module) -> None:
    """Adds the adapters of the platform's `model` to a stage, with undefined values. Does nothing if it has none.

    source_of: returns the source of a parameter of the stage.
    """
    whole = model.state_dict()
    if not any(".lora_A." in name for name in whole):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    linear = [
        (module, source_of(f"{name}.weight"))
        for name, module in stage.decoder.named_modules(prefix="decoder")
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    for module, source in linear:
        if any(adapter_name(name, "A") in whole for name in source.names):
            module.adapters = Adapters(source, whole, layer, stage.config)
            module.register_forward_hook(_add)
    if stage.pre_process:
        # Recomputed layers have gradients only if their input has one.
        stage.embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())


def _add(linear: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Adds the output of the adapters to that of a linear layer, unless they are switched off."""
    if not linear.adapters.enabled:
        return output
    (hidden,), (out, bias) = inputs, output
    if hasattr(linear, "layer_norm_weight"):  # Transformer Engine's layers include the norm of their input
        hidden = F.rms_norm(hidden, hidden.shape[-1:], linear.layer_norm_weight, linear.config.layernorm_epsilon)
    return out + linear.adapters(hidden), bias


def _matrix(shape: tuple[int, int], dtype: torch.dtype, *, split: bool) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
    parameter.tensor_model_parallel = split  # Megatron counts each rank's part in the gradient norm
    return parameter


def _reduced(low: Tensor, sequence: bool) -> Tensor:
    """Sums over the tensor ranks, which have shares of the input channels; each gets all tokens or its share."""
    if sequence:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(low)


def _shared(low: Tensor, sequence: bool) -> Tensor:
    """Gives all tokens to every tensor rank and sums their gradients."""
    if sequence:
        return tensor_parallel.gather_from_sequence_parallel_region(low)
    return tensor_parallel.copy_to_tensor_model_parallel_region(low)
