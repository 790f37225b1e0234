"""The shape of a language model and its numbers of parameters, products and activations, without weights and torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rl_platform.config.schema.models import Lora

FLOAT = 4  # bytes of float32, the type of parameters and optimizer state


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024). Queries and keys have `plain` + `rotary` channels a head, values
    have `value`. Keys and values are computed from `keys` channels; so are queries from `queries` channels, unless it
    is 0."""

    queries: int
    keys: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder. `attention_bias`: of q, k and v; `output_bias`: of the attention's output; `qk_norm`: norms over query
    and key heads; `norms`: over hidden states, of a layer; `sinks`: a number per head; `expert_bias`: of experts and
    router; `value_head`: a scalar head in place of the vocabulary's. `experts` above 0: a layer has as many
    feed-forward networks, each of width `intermediate`. A token goes through `active_experts` of them and through one
    of width `shared`. The latter has a gate if `shared_gate`. The first `dense_layers` layers have one of width
    `dense_intermediate` instead. `gated` False: feed-forward networks have two matrices, not three."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    qk_norm: bool = False
    norms: int = 2
    sinks: bool = False
    expert_bias: bool = False
    value_head: bool = False
    experts: int = 0
    active_experts: int = 0
    shared: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_intermediate: int = 0
    latent: Latent | None = None

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def projections(self) -> int:
        """Returns the number of parameters of one layer's attention matrices."""
        latent = self.latent
        if latent is None:
            return self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        width = self.attention_width
        queries = latent.queries * (self.hidden + width) if latent.queries else self.hidden * width
        keys = self.hidden * (latent.keys + latent.rotary)
        values = self.heads * latent.value
        return queries + keys + latent.keys * (self.heads * latent.plain + values) + values * self.hidden

    @cached_property
    def matrices_per_layer(self) -> int:
        """Returns the number of parameters of one layer's matrices: of a layer with experts, if there are any."""
        shared = 3 * self.hidden * self.shared + self.hidden * self.shared_gate
        router = self.hidden * self.experts
        return self.projections + self._network * max(self.experts, 1) + router + shared

    @property
    def _network(self) -> int:
        """Returns the number of parameters of one feed-forward network, with biases of experts: rows of a matrix."""
        biases = (2 * self.intermediate + self.hidden) * self.expert_bias
        return (2 + self.gated) * self.hidden * self.intermediate + biases

    @property
    def matrices(self) -> int:
        """Returns the number of parameters of the matrices of all layers."""
        return self.layers * self.matrices_per_layer - self._less

    @property
    def _less(self) -> int:
        """Returns the number of parameters by which all dense layers are smaller than layers with experts."""
        dense = self.projections + 3 * self.hidden * self.dense_intermediate
        return self.dense_layers * (self.matrices_per_layer - dense)

    @property
    def expert_parameters(self) -> int:
        """Returns the number of parameters of all experts of all layers."""
        return self._network * self.experts * (self.layers - self.dense_layers)

    @property
    def inactive_parameters(self) -> int:
        """Returns the number of parameters of experts that a token does not go through, in all layers."""
        return self.expert_parameters * (self.experts - self.active_experts) // max(self.experts, 1)

    @property
    def feed_forward_width(self) -> int:
        """Returns the channels of one token between the feed-forward matrices, of all its experts."""
        return self.intermediate * max(self.active_experts, 1) + self.shared

    @cached_property
    def layer_parameters(self) -> int:
        """Returns the number of parameters of one layer: of one with experts, if there are any."""
        biases = (self.attention_width + 2 * self.kv_width) * self.attention_bias + self.hidden * self.output_bias
        biases += ((1 + self.gated) * self.intermediate + self.hidden) * self.mlp_bias
        biases += self.heads * self.sinks + self.experts * self.expert_bias
        norms = self.norms * self.hidden + 2 * self.head_dim * self.qk_norm
        norms += self.latent.queries + self.latent.keys if self.latent else 0
        return self.matrices_per_layer + biases + norms

    @cached_property
    def decoder_parameters(self) -> int:
        """Returns the number of parameters of all layers."""
        return self.layers * self.layer_parameters - self._less

    @property
    def linear_layers(self) -> dict[str, int]:
        """Returns the channels in and out of the linear layers that adapters can target, by last name, over all layers.

        transformers keeps the experts of a layer in one tensor, which has no adapters.
        """
        hidden, queries, latent = self.hidden, self.attention_width, self.latent
        channels = {"q_proj": hidden + queries, "o_proj": queries + hidden}
        channels |= dict.fromkeys(("k_proj", "v_proj"), hidden + self.kv_width)
        if latent is not None:
            channels = {"q_proj": hidden + queries, "o_proj": self.heads * latent.value + hidden}
            if latent.queries:
                channels |= {"q_proj": 0, "q_a_proj": hidden + latent.queries, "q_b_proj": latent.queries + queries}
            channels["kv_a_proj_with_mqa"] = hidden + latent.keys + latent.rotary
            channels["kv_b_proj"] = latent.keys + self.heads * (latent.plain + latent.value)
        channels = {name: self.layers * each for name, each in channels.items()}
        widths = [(self.layers, self.intermediate)]
        if self.experts:
            shared = (self.layers - self.dense_layers) * bool(self.shared)
            widths = [(self.dense_layers, self.dense_intermediate), (shared, self.shared)]
            channels["shared_expert_gate"] = shared * (hidden + 1) * self.shared_gate
        dense = sum(layers * (hidden + width) for layers, width in widths)
        channels |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), dense)
        return {name: each for name, each in channels.items() if each}

    def adapter_parameters(self, lora: Lora) -> int:
        """Returns the parameters of the adapters of all layers."""
        channels = self.linear_layers
        return lora.rank * sum(channels.get(name, 0) for name in set(lora.target_modules))

    @property
    def head_parameters(self) -> int:
        """Returns the number of parameters of the output head: 0 if it is the embedding. A value head has a bias."""
        if self.value_head:
            return self.hidden + 1
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Returns the number of parameters outside the layers: embedding, last norm, head."""
        return self.vocabulary * self.hidden + self.hidden + self.head_parameters

    @property
    def parameters(self) -> int:
        return self.decoder_parameters + self.outer_parameters

    @property
    def largest_tensor(self) -> int:
        """Returns the size of the largest parameter: the embedding, or gate and up matrices of all experts."""
        return self.hidden * max(self.vocabulary, 2 * self.intermediate * max(1, self.experts))

    @property
    def active_parameters(self) -> int:
        """Returns the number of parameters that one token uses."""
        return self.parameters - self.inactive_parameters

    @property
    def products_per_token(self) -> int:
        """Returns the multiply-adds of one token's forward pass, without attention scores."""
        head = self.hidden * (1 if self.value_head else self.vocabulary)
        return self.matrices - self.inactive_parameters + head

    @property
    def whole_kv_elements_per_token(self) -> int:
        """Returns the cached numbers of a token in the built-in engine, which stores keys and values of all heads."""
        if self.latent is None:
            return self.kv_elements_per_token
        return self.layers * 2 * self.heads * max(self.head_dim, self.latent.value)

    @property
    def kv_elements_per_token(self) -> int:
        each = 2 * self.kv_width if self.latent is None else self.latent.keys + self.latent.rotary
        return self.layers * each
