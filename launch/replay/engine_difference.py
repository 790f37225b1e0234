"""Explains how the log-probs of the rollout engine and of the trainer differ in a recorded step of a language model.

The recorded differences are shown by position in the response and by class of token. The row with the largest one runs
again through both engines, with the weights before the step, and their hidden states are compared layer by layer. Not
covered: hidden states of hosted engines, for which the built-in engine runs here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from rl_platform.components.actor import LanguageActor
from rl_platform.config.rollout_backend import chosen_backend
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.build import generation_dtype
from rl_platform.engines.rollout.decoder import FusedDecoder
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.causal_lm import load_config
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import Attention
from rl_platform.models.tokenizer import Tokenizer, load_tokenizer, stops
from rl_platform.records import RolloutBatch, SamplingParams
from rl_platform.runners.component_groups import LearnerGroup
from rl_platform.runtime.worker_group import Handle

CPU = torch.device("cpu")
BUCKETS = (1, 2, 5, 17, 65, 257)  # first positions of the groups that are shown, from 1
PARTED = 10.0  # a layer starts a difference if it makes one this many times as large as its input's, or as rounding
MOST_SHOWN = 12  # layers
UNDECODABLE = "\ufffd"  # in the text of a token that is a part of a character


@dataclass(frozen=True)
class LayerDifferences:
    """Of one row: relative differences |h_rollout - h_trainer| / |h_trainer| of the embeddings, after each layer but
    the last, and after the last norm, as means over its tokens; the mean absolute difference of its log-probs."""

    relative: tuple[float, ...]
    log_probs: float


class ComparedActorGroup(LearnerGroup, Protocol):
    def layers(self, row: RolloutBatch) -> Handle[LayerDifferences | None]: ...


class ComparedActor(LanguageActor):
    """The actor of a replay, which also runs a response through the built-in rollout engine."""

    def layers(self, row: RolloutBatch) -> LayerDifferences | None:
        """Of a batch of one row. None for an architecture whose layers cannot be observed."""
        (language,) = [module for module in self.engine.model.modules() if isinstance(module, LanguageModel)]
        if not (hasattr(language.backbone, "layers") and hasattr(language.backbone, "norm")):
            return None
        tokens = row.inputs["tokens"][0, : int(row.inputs["lengths"][0])].tolist()
        first = int(row.mask[0].nonzero()[0])
        with _Observed(language) as trained:
            log_probs = self.outputs(row).log_probs
        assert log_probs is not None
        engine = self._engine()
        engine.receive(self.publish(0, copy=True))
        generated, states = forced(engine, tokens[:first], tokens[first:], self.config.rollout.sampling.temperature)
        ours = [_together(parts)[: len(tokens) - 1] for parts in trained.states]
        relative = tuple(float(_relative(theirs, mine)) for theirs, mine in zip(states, ours, strict=True))
        mask = row.mask[0, first : len(tokens)]
        gap = (generated - log_probs[0, first : len(tokens)]).abs()[mask]
        return LayerDifferences(relative, float(gap.mean()))

    def _engine(self) -> TorchRolloutEngine:
        tokenizer = load_tokenizer(self.config.actor.model)
        model_config = load_config(self.config.actor.model, tokenizer.vocab_size, tokenizer.eos_token_ids[0])
        return TorchRolloutEngine(model_config, (), 1, CPU, generation_dtype(self.config.actor.model.dtype, CPU))


class _Observed:
    """Notes the hidden states that enter each layer of a model, and those after its last norm, while it is open.

    states: by place, in the order of the layers; each a list of [N,H], one for each forward pass.
    """

    def __init__(self, language: LanguageModel) -> None:
        self.backbone = language.backbone
        self.states: list[list[Tensor]] = [[] for _ in range(len(self.backbone.layers) + 1)]

    def __enter__(self) -> _Observed:
        def entering(seen: list[Tensor]) -> Callable[..., None]:
            def note(module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                seen.append(_rows(args[0] if args else kwargs["hidden_states"]))

            return note

        def leaving(module: object, args: object, output: Tensor) -> None:
            self.states[-1].append(_rows(output))

        layers = zip(self.backbone.layers, self.states, strict=False)
        self._hooks = [layer.register_forward_pre_hook(entering(seen), with_kwargs=True) for layer, seen in layers]
        self._hooks.append(self.backbone.norm.register_forward_hook(leaving))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def forced(
    engine: TorchRolloutEngine, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> tuple[Tensor, list[Tensor]]:
    """Generates `response` [R], whatever the engine would sample.

    Returns its log-probs [R], and the hidden states [N,H] of all tokens but the last, as in `_Observed`.
    """
    left, log_probs = list(reversed(response)), list[Tensor]()

    def next_token(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        token = torch.tensor([left.pop()])
        scaled = logits.float() / (temperature or 1.0)
        log_probs.append(scaled.log_softmax(-1)[0, token])
        return token, log_probs[-1]

    request = Request(0, tuple(prompt), seed=0)
    with torch.inference_mode(), _Observed(engine.model) as observed:
        engine._pack()
        batch = engine._new_batch([request], SamplingParams(len(response), 1.0, 1.0, 0))
        batch._sample = next_token
        if isinstance(engine._decoder, FusedDecoder):  # which does not call the modules of layers
            _observe(engine._decoder, observed.states)
        while left:
            batch.step()
    return torch.cat(log_probs).clone(), [_together(parts) for parts in observed.states]


def _observe(decoder: FusedDecoder, states: list[list[Tensor]]) -> None:
    def watched(layer: Callable[..., Tensor], seen: list[Tensor]) -> Callable[..., Tensor]:
        def run(residual: Tensor, more: Tensor | None, *others: object) -> Tensor:
            seen.append(_rows(residual) if more is None else _rows(residual) + _rows(more))
            return layer(residual, more, *others)

        return run

    hidden = decoder.hidden

    def last(tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        output = hidden(tokens, positions, attention)
        states[-1].append(_rows(output))
        return output

    decoder.layers = [watched(layer, seen) for layer, seen in zip(decoder.layers, states, strict=False)]  # type: ignore[misc]
    decoder.hidden = last  # type: ignore[method-assign]


def _rows(states: Tensor) -> Tensor:
    """[1,N,H] or [N,H] -> [N,H] float32, a copy."""
    return states.detach().reshape(-1, states.shape[-1]).to(torch.float32, copy=True)


def _together(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).clone()


def _relative(theirs: Tensor, ours: Tensor) -> Tensor:
    difference: Tensor = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-30)
    return difference.mean()


def worst_row(batch: RolloutBatch, log_probs: Tensor) -> RolloutBatch | None:
    """Returns the row with the largest difference between `log_probs` [B,T] of the trainer and those of the rollout."""
    gap = _gap(batch, log_probs)
    return None if gap is None else batch.select(gap.amax(dim=1).argmax()[None])


def explanation(
    config: Config, batch: RolloutBatch, log_probs: Tensor, layers: LayerDifferences | None
) -> Iterator[str]:
    """Yields lines for the terminal. log_probs [B,T]: of the trainer, as they were recorded."""
    gap = _gap(batch, log_probs)
    if gap is None:
        return
    tokenizer, mask = load_tokenizer(config.actor.model), batch.mask
    row, column = (int(index) for index in torch.unravel_index(gap.argmax(), gap.shape))
    gaps, token = gap[mask], int(batch.inputs["tokens"][row, column])
    yield (
        f"log-probs of rollout and trainer: {_spread(gaps)}, in row {row} at {_text(tokenizer, token)!r} "
        f"(position {int(mask[row, : column + 1].sum())})"
    )
    positions = mask.cumsum(dim=1)
    for first, after in pairwise((*BUCKETS, int(positions.max()) + 1)):
        inside = mask & (positions >= first) & (positions < after)
        if bool(inside.any()):
            name = f"position {first}" + (f" to {after - 1}" if after - 1 > first else "")
            yield f"  {name:28} {_spread(gap[inside])}"
    ends = {*tokenizer.eos_token_ids, *stops(tokenizer, config.rollout.stop)[0]}
    sampled = set(batch.inputs["tokens"][mask].tolist())
    classes = {one: "end" if one in ends else token_class(_text(tokenizer, one)) for one in sampled}
    for name in sorted(set(classes.values())):
        of_class = torch.tensor([one for one, kind in classes.items() if kind == name])
        yield f"  {name:28} {_spread(gap[mask & torch.isin(batch.inputs['tokens'], of_class)])}"
    if layers is not None:
        yield from _by_layer(config, layers, float(gap[row][mask[row]].mean()), row)


def _by_layer(config: Config, layers: LayerDifferences, recorded: float, row: int) -> Iterator[str]:
    dtype = generation_dtype(config.actor.model.dtype, CPU)
    yield f"hidden states of both engines, row {row}, generation in {str(dtype).removeprefix('torch.')}, relative:"
    last = len(layers.relative) - 1
    names = ["embedding", *(f"after layer {number}" for number in range(1, last)), f"after layer {last} and the norm"]
    shown = range(len(names)) if len(names) <= MOST_SHOWN else [*range(MOST_SHOWN - 1), last]
    for number in shown:
        yield f"  {names[number]:28} {layers.relative[number]:.2g}"
    rounding = torch.finfo(dtype).eps
    parted = [
        number
        for number, (before, here) in enumerate(pairwise((0.0, *layers.relative)))
        if here > PARTED * max(before, rounding)
    ]
    if parted:
        yield f"the engines part {names[parted[0]].replace('after', 'in')}"
    else:
        yield "no layer adds more than rounding"
    if recorded > PARTED * max(layers.log_probs, rounding):
        backend = chosen_backend(config.rollout.backend, False)[0]
        engine = "" if backend == "torch" else f", or {backend}, which does not run here"
        age = ", which are older with runner.max_staleness" if config.runner.max_staleness else ""
        yield (
            f"here the engines differ by {layers.log_probs:.2g} in the mean, in the recorded step by {recorded:.2g}: "
            f"the cause is not in the layers but in what the rollout had, such as other weights{age}{engine}"
        )


def _gap(batch: RolloutBatch, log_probs: Tensor) -> Tensor | None:
    """|difference| [B,T], 0 where no token was sampled; None if nothing was."""
    if batch.rollout_log_probs is None or not bool(batch.mask.any()):
        return None
    return (log_probs - batch.rollout_log_probs).abs().masked_fill(~batch.mask, 0.0)


def _spread(values: Tensor) -> str:
    return f"{len(values):6} tokens   mean {float(values.mean()):.2g}   largest {float(values.max()):.2g}"


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], special=True)


def token_class(text: str) -> str:
    """Returns the class of a token by its text; spaces around it do not count."""
    text = text.strip()
    if not text:
        return "whitespace"
    if text.isdigit():
        return "digits"
    if text.isalpha():
        return "letters"
    marks = all(unicodedata.category(character)[0] in "PS" for character in text) and UNDECODABLE not in text
    return "punctuation" if marks else "other"
