"""Training of a Llama on one CPU rank with `dtype: bfloat16`: the engine, and which models it covers.

Everything but the forward and backward pass is `FSDPEngine`'s: float32 parameters, gradients and Adam.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from rl_platform.accel.bfloat16_layers import FinalNorm, HalfLayer, HalfWeights, HeadLogProbs, Layer, Norm
from rl_platform.accel.embedding_gradient import Embedding
from rl_platform.accel.openmp_team import has_team
from rl_platform.config.schema.models import Optim
from rl_platform.engines.training.base import EngineOptions
from rl_platform.engines.training.fsdp import FSDPEngine, autocast
from rl_platform.models.forward import TokenModel, TokenPolicy
from rl_platform.models.language import PLAIN_LOGITS, LanguageModel, Statistic, in_chunks
from rl_platform.models.packed import Attention


def trains_in_bfloat16(model: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the engine covers the model: a plain Llama on a CPU, all of it trained or, as a reference, none
    of it."""
    if dtype != torch.bfloat16 or device.type != "cpu" or not has_team():
        return False
    if not isinstance(model, TokenModel):
        return False
    language = model.model
    return (
        language.config.model_type == "llama"
        and language.config.hidden_act == "silu"
        and language.pretrained is None
        and language.logit_transform == PLAIN_LOGITS
        and len({parameter.requires_grad for parameter in model.parameters()}) == 1
        and not any(name.endswith("bias") for name, _ in language.backbone.named_parameters())
        and all(type(module) is nn.Linear for name, module in language.named_modules() if name.endswith("_proj"))
    )


class Bfloat16Engine(FSDPEngine):
    """`model`: one for which `trains_in_bfloat16` is true, on the only rank."""

    def __init__(self, model: nn.Module, optim: Optim, **options: Unpack[EngineOptions]) -> None:
        options["dtype"] = torch.float32  # of parameters, gradients and Adam
        super().__init__(model, optim, **options)
        assert isinstance(model, TokenModel)
        self.language = HalfLanguage(model.model)
        model.model.hidden = self.language.hidden  # type: ignore[method-assign]
        if isinstance(model, TokenPolicy):
            model.model.log_probs = self.language.log_probs  # type: ignore[method-assign]


class HalfLanguage:
    """`LanguageModel.hidden` and `LanguageModel.log_probs` with bfloat16 products."""

    def __init__(self, model: LanguageModel) -> None:
        backbone = model.backbone
        self.model, self.embedding, self.rotary = model, backbone.embed_tokens, backbone.rotary_emb
        self.layers = [HalfLayer(layer) for layer in backbone.layers]
        self.norm, self.head = Norm(backbone.norm), HalfWeights(model.head.weight)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """tokens, positions [N] -> last hidden states [N,H] float32."""
        training = torch.is_grad_enabled()
        states = Embedding.apply(self.embedding.weight, tokens, self.embedding.padding_idx)
        cos, sin = (table[0][:, None] for table in self.rotary(states, positions[None]))
        half = sin.shape[-1] // 2
        rotation = cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for layer in self.layers:
            states = Layer.apply(states, layer, attention, rotation, training)
        result: Tensor = FinalNorm.apply(states, self.norm)
        return result

    def log_probs(
        self, states: Tensor, targets: Tensor, temperature: float, statistic: Statistic
    ) -> tuple[Tensor, Tensor | None]:
        if statistic not in ("none", "entropy"):
            with autocast(states.device, torch.bfloat16):
                return LanguageModel.log_probs(self.model, states, targets, temperature, statistic)
        parts = in_chunks(self._chunk, (states, targets), temperature, statistic == "entropy")
        log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        return log_probs, entropies if statistic == "entropy" else None

    def _chunk(self, states: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        options = temperature, entropy, torch.is_grad_enabled()
        log_probs, entropies = HeadLogProbs.apply(states, targets, self.head, *options)
        return log_probs, entropies
