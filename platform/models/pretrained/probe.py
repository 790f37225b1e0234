"""Compares the forward pass of a training backend with that of transformers on a few tokens, when a model is loaded.

A test compares every family on a small random model. The probe compares the loaded weights, so an option of their
config.json that no test has, or another version of transformers, cannot change the numbers silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.errors import DataError
from rl_platform.models.attention import window_of
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import ATTENTION, PackedTokens, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

Outputs = tuple[Sequence[Tensor], Tensor]
"""Hidden states [N,H]: of the embedding, then after each layer, the last one after the final norm; logits [N,V]."""
PREFIX, SHORT, LONG = 5, 7, 12  # tokens that the packed sequences share, and of each sequence
MOST = 160  # tokens; windows up to about this length are crossed
TOLERANCE = 1e-3  # of the largest number of a token; rounding in float32 stays below 1e-4


@torch.no_grad()
def probe(network: PreTrainedModel, forward: Callable[[PackedTokens], Outputs], folder: str, key: str) -> None:
    """Raises DataError if `forward` computes other logits than `network` with transformers' eager attention.

    One short sequence, then a packed batch of two, are computed. The message names the layer where the difference
    begins. A token counts with its largest difference relative to its largest number, and a sequence with the median of
    its tokens: rounding may send a single token to another expert. Tokens beyond a window are judged by themselves.
    """
    sequences = probe_sequences(network)
    network.set_attn_implementation("eager")
    expected = [_of_transformers(network(tokens[None], output_hidden_states=True)) for tokens in sequences]
    network.set_attn_implementation(ATTENTION)
    window = _shortest_window(network)
    for name, rows in (("one short sequence", [0]), ("a packed batch of two sequences", [1, 2])):
        packed = pack([sequences[row] for row in rows])
        states, logits = forward(packed)
        for row, places in zip(rows, packed.flat_index, strict=True):
            here = places[: len(sequences[row])]
            stages = [*zip(expected[row][0], (state[here] for state in states), strict=False)]
            stages.append((expected[row][1], logits[here]))
            differences = [_difference(ours, theirs, window) for theirs, ours in stages]
            if differences[-1] > TOLERANCE:
                first = next(index for index, difference in enumerate(differences) if difference > TOLERANCE)
                raise DataError(_message(network, name, first, len(states), differences[-1], folder, key))


def own_forward(network: PreTrainedModel, model: LanguageModel, packed: PackedTokens) -> Outputs:
    """Returns the forward pass of plain torch (`fsdp`), with the token head of `network`."""
    inputs = {"input_ids": packed.tokens[None], "position_ids": packed.positions[None]}
    output = model.backbone(**inputs, attention=packed.attention, use_cache=False, output_hidden_states=True)
    states = [state[0] for state in output.hidden_states]
    return states, model.logit_transform(network.get_output_embeddings()(states[-1]))


def probe_sequences(network: PreTrainedModel) -> list[Tensor]:
    """Returns tokens of a short sequence and of two that share a prefix. A short window is crossed by one of them."""
    window = _shortest_window(network)
    longest = window + LONG if window is not None and window + LONG <= MOST else LONG
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> Tensor:
        return torch.randint(network.config.vocab_size, (count,), generator=generator)

    prefix = drawn(PREFIX)
    return [drawn(SHORT), *(torch.cat([prefix, drawn(count - PREFIX)]) for count in (longest, SHORT))]


def _shortest_window(network: PreTrainedModel) -> int | None:
    windows = [window_of(network.config, layer) for layer in range(network.config.num_hidden_layers)]
    return min((window for window in windows if window is not None), default=None)


def _of_transformers(output: CausalLMOutput) -> Outputs:
    return [state[0] for state in output.hidden_states], output.logits[0]


def _difference(ours: Tensor, theirs: Tensor, window: int | None) -> float:
    """[L,N], [L,N] -> the larger of the median over all tokens and that over the tokens beyond the window."""
    each = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1).clamp(min=1e-6)
    parts = [each] if window is None or window >= len(each) else [each, each[window:]]
    medians = [float(part.median()) for part in parts]
    return max(median if median == median else torch.inf for median in medians)  # NaN: it differs


def _message(
    network: PreTrainedModel, name: str, first: int, states: int, difference: float, folder: str, key: str
) -> str:
    layers, kind = network.config.num_hidden_layers, network.config.model_type
    place = "in the embedding" if first == 0 else f"in layer {first - 1} of {layers} (counted from 0)"
    if first == layers:
        place += " or in the final norm"
    if first == states:
        place = "in the output head"
    return (
        f"{key}: {folder} ({kind}) computes other numbers here than in transformers: for {name} the logits differ by "
        f"{difference:.1e} of the largest one (allowed: {TOLERANCE:.0e}), and the difference begins {place}. Use "
        "another model, or report its config.json; docs/families.md lists families"
    )
