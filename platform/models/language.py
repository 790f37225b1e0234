"""Language models: a transformers backbone on packed tokens, with a token head or a value head.

The caller passes the attention object with the tokens: `packed.PackedAttention` in training, the paged caches of the
rollout engine in generation. This needs an architecture that uses transformers' attention interface, mixes tokens in
attention only and has a linear head; `pretrained/families.py` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rl_platform import acceleration
from rl_platform.algorithms.kl import full_kl
from rl_platform.models.attention import Features
from rl_platform.models.autograd_context import AutogradContext
from rl_platform.models.decoder_layers import SelfAttention
from rl_platform.models.packed import ATTENTION, Attention, PackedTokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")
# What is computed of each token's distribution beside a log-prob. An entropy without gradient stores nothing.
Statistic = Literal["none", "entropy", "entropy_gradient", "squared_probs"]
ROWS_AT_A_TIME = 16  # of logits on a CPU
TOKENS_PER_CHUNK = 1024  # logits [1024, vocabulary] are the most that exist at the same time


def _attend(
    module: SelfAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: object,
    scaling: float,
    *,
    attention: Attention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    plain = not sliding_window and softcap is None and s_aux is None  # Qwen2-MoE writes 0 for no window
    features = None if plain else Features(sliding_window or None, softcap, s_aux)
    out = attention(module.layer_idx, query, key, value, scaling, features)
    return out[None], None


@dataclass(frozen=True)
class LogitTransform:
    """A change of the head's output, which some families have: c tanh(scale x / c), with softcap c; None: scale x.

    Gemma 2 caps logits, Cohere and Granite scale them.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitTransform:
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


PLAIN_LOGITS = LogitTransform()


class LanguageModel(nn.Module):
    """Backbone and head. `head` is the LM head [hidden -> vocabulary] or a float32 scalar head.

    logit_transform: turns the output of the LM head into logits. pretrained: the weights of a model on the meta device,
    as parts by name, from which its training engine fills what the rank holds; None: the model has its weights.
    """

    pretrained: Iterable[Mapping[str, Tensor]] | None = None

    def __init__(self, network: PreTrainedModel, *, value_head: bool = False) -> None:
        super().__init__()
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        network.set_attn_implementation(ATTENTION)
        self.config = network.config
        self.logit_transform = LogitTransform.of(network.config)
        self.backbone = network.base_model
        if value_head:  # zero weights: values start at 0 for hidden states of any scale
            self.head = nn.Linear(network.config.hidden_size, 1, dtype=torch.float32)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        else:
            self.head = network.get_output_embeddings()

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """tokens, positions [N] -> last hidden states [N,H]."""
        inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
        output = self.backbone(**inputs, attention=attention, use_cache=False)
        states: Tensor = output.last_hidden_state[0]
        return states

    def states_before(self, packed: PackedTokens, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the last hidden states [K,H] that predict the positions (rows, columns) [K], one position earlier."""
        states = self.hidden(packed.tokens, packed.positions, packed.attention)
        return states.index_select(0, packed.flat_index[rows, columns - 1])

    def log_probs(
        self, states: Tensor, targets: Tensor, temperature: float, statistic: Statistic
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs [K] of `targets` [K] given `states` [K,H] of `states_before`, and a statistic [K] or None.

        Logits are divided by `temperature` and computed for TOKENS_PER_CHUNK positions at a time.
        """
        shared = (self.head.weight, temperature, statistic, self.logit_transform)
        fusable = len(states) > TOKENS_PER_CHUNK and statistic != "squared_probs"
        if fusable and (fused := acceleration.find("log_probs_function", states.device)):
            fused_parts: tuple[Tensor, Tensor | None] = fused(states, targets, *shared)
            return fused_parts
        parts = in_chunks(token_log_probs, (states, targets), *shared)
        log_probs = torch.cat([part[0] for part in parts])
        statistics = [part[1] for part in parts if part[1] is not None]
        return log_probs, torch.cat(statistics) if statistics else None

    def values(self, packed: PackedTokens, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns values [K] float32 of the states before the positions (rows, columns) [K]."""
        states = self.states_before(packed, rows, columns)
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.head(states.float()).squeeze(-1)
            return values


def in_chunks(function: Callable[..., T], rows: tuple[Tensor, Tensor], *shared: object) -> list[T]:
    """Calls `function(*chunk, *shared)` for TOKENS_PER_CHUNK rows of both tensors at a time.

    The backward pass recomputes several chunks, so that their logits never exist together.
    """
    chunks = zip(*(tensor.split(TOKENS_PER_CHUNK) for tensor in rows), strict=True)
    if not torch.is_grad_enabled() or len(rows[0]) <= TOKENS_PER_CHUNK:  # a single chunk saves no memory
        return [function(*chunk, *shared) for chunk in chunks]
    return [checkpoint(function, *chunk, *shared, use_reentrant=False) for chunk in chunks]


def full_kl_of_states(
    states: Tensor,
    weight: Tensor,
    reference_states: Tensor,
    reference_weight: Tensor,
    temperature: float,
    transform: LogitTransform = PLAIN_LOGITS,
) -> Tensor:
    """Returns KL(pi || pi_ref) [K] float32 over the whole vocabulary, differentiable in `states` and `weight`.

    The logits of both models are transformed and divided by `temperature`. `states` [K,H], `weight` [V,H];
    `reference_states` [K,G] and `reference_weight` [V,G] may have another width. The reference sends hidden states,
    because the logits of a whole batch do not fit into memory.
    """

    def chunk(states: Tensor, reference_states: Tensor) -> Tensor:
        pairs = ((states, weight), (reference_states, reference_weight))
        logits, reference = (transform(F.linear(*pair).float()) / temperature for pair in pairs)
        return full_kl(logits, reference)

    return torch.cat(in_chunks(chunk, (states, reference_states)))


def token_log_probs(
    states: Tensor,
    targets: Tensor,
    weight: Tensor,
    temperature: float,
    statistic: Statistic,
    transform: LogitTransform = PLAIN_LOGITS,
) -> tuple[Tensor, Tensor | None]:
    """states [K,H], targets [K], weight [V,H] -> log-probs [K] and a statistic [K] or None, float32."""
    logits = transform(F.linear(states, weight).float())
    if statistic in ("none", "entropy"):
        apply: Callable[..., tuple[Tensor, Tensor | None]] = _LogProbs.apply
        log_probs, entropies = apply(logits, targets, temperature, statistic == "entropy")
        return log_probs, entropies
    if temperature != 1.0:
        logits = logits / temperature
    norm = torch.logsumexp(logits, dim=-1)
    log_probs = logits.gather(1, targets[:, None]).squeeze(1) - norm
    if statistic == "squared_probs":  # sum_v softmax(z)_v^2
        return log_probs, torch.exp(logits - norm[:, None]).square().sum(dim=-1)
    # H = logsumexp(z) - sum_v softmax(z)_v z_v
    return log_probs, norm - (torch.exp(logits - norm[:, None]) * logits).sum(dim=-1)


def row_blocks(rows: Tensor) -> Sequence[Tensor]:
    """Splits logits or numbers of their rows, [K,...], into parts whose temporaries fit into a processor's cache."""
    return rows.tensor_split(max(1, -(-len(rows) // ROWS_AT_A_TIME)))


def _normalizers(logits: Tensor, *, entropy: bool) -> tuple[Tensor, ...]:
    """Returns logsumexp(z) of each row of logits [K,V], and its entropy if `entropy`."""
    norm = torch.logsumexp(logits, dim=-1)
    if not entropy:
        return (norm,)
    # H = logsumexp(z) - sum_v softmax(z)_v z_v
    return norm, norm - (logits - norm[:, None]).exp_().mul_(logits).sum(dim=-1)


class _LogProbsContext(AutogradContext):
    temperature: float


class _LogProbs(torch.autograd.Function):
    """Log-probs [K] of logits [K,V], and entropies [K] without gradient.

    Computes autograd's operations, with equal bits. Both passes overwrite the logits; on a CPU they allocate no
    other tensor of that size.
    """

    @staticmethod
    def forward(
        ctx: _LogProbsContext, logits: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        scaled = logits.detach() if temperature == 1.0 else logits.detach().div_(temperature)
        blocks = row_blocks(scaled) if scaled.device.type == "cpu" else [scaled]
        columns = zip(*(_normalizers(rows, entropy=entropy) for rows in blocks), strict=True)
        norm, *entropies = (column[0] if len(column) == 1 else torch.cat(column) for column in columns)
        log_probs = scaled.gather(1, targets[:, None]).squeeze(1) - norm
        ctx.temperature = temperature
        ctx.save_for_backward(scaled, targets, norm)
        if not entropy:
            return log_probs, None
        ctx.mark_non_differentiable(*entropies)
        return log_probs, entropies[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: _LogProbsContext, of_log_probs: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        scaled, targets, norm = ctx.saved_tensors
        # d log p_t / dz_v = [v = t] - p_v
        gradient = scaled.sub_(norm[:, None]).exp_().mul_(-of_log_probs[:, None])
        gradient.scatter_add_(1, targets[:, None], of_log_probs[:, None])
        if ctx.temperature != 1.0:
            gradient /= ctx.temperature
        return gradient, None, None, None
