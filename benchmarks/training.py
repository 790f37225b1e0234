"""Seconds of an optimizer step with either training backend, next to a plain transformers loop in the same run.

A model of the shape of SmolLM2-135M with random weights, float32, one rank: log-probabilities of the responses, the
clipped policy loss, backward, gradient clipping and AdamW, without recomputation. Two cases:

* equal: rows of one length. Nothing can be saved, so the ratio is the price of the backend.
* mixed: lengths from an eighth of it to all of it. transformers pads the rows, ours packs them.

transformers gets its scaled-dot-product attention and the fused AdamW that ours use, and makes the logits of the
responses only. Not covered: several ranks, GPUs, Transformer Engine.

    python benchmarks/training.py [--rows 4] [--length 256] [--rounds 4] [--warm-up 1] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from _common import Entry, Turns, machine, new_parser, print_verdict, race, ratios, write_json

if TYPE_CHECKING:
    from rl_platform.records import RolloutBatch

TARGETS = {"equal": 1 / 1.15, "mixed": 1.5}
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
QUICK = {"vocab_size": 512, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}
TRANSFORMERS, BACKENDS = "transformers", ("fsdp", "megatron")


def network(settings: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = QUICK if settings.quick else SMOLLM2
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))


def batch(settings: argparse.Namespace) -> RolloutBatch:
    """Rows whose first quarter is the prompt."""
    import torch

    from rl_platform.records import RolloutBatch

    draw = torch.Generator().manual_seed(0)
    rows, longest = settings.rows, settings.length
    shortest = longest // 8 if settings.mixed else longest
    lengths = torch.linspace(shortest, longest, rows).long()
    positions = torch.arange(longest)
    mask = (positions >= lengths[:, None] // 4) & (positions < lengths[:, None])
    tokens = torch.randint((QUICK if settings.quick else SMOLLM2)["vocab_size"], mask.shape, generator=draw)
    return RolloutBatch(
        inputs={"tokens": tokens, "lengths": lengths},
        action_mask=mask,
        sample_mask=torch.ones(rows, dtype=torch.bool),
        group_ids=torch.arange(rows),
        rewards=torch.zeros(mask.shape),
        rollout_log_probs=torch.zeros(mask.shape),
        log_probs=0.1 * torch.randn(mask.shape, generator=draw) - 10.8,
        advantages=torch.randn(mask.shape, generator=draw),
    )


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.algorithms.losses import actor_loss
    from rl_platform.config.schema.algorithm import Algorithm
    from rl_platform.config.schema.models import Trainable
    from rl_platform.engines.training.base import MicroBatches
    from rl_platform.engines.training.build import training_engine
    from rl_platform.models.forward import TokenPolicy
    from rl_platform.models.language import LanguageModel
    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    engine = training_engine(
        Trainable(training_backend=settings.backend),
        TokenPolicy(LanguageModel(network(settings)), temperature=1.0),
        dtype=torch.float32,
        horizon=1,
        device=torch.device("cpu"),
        nominal=False,
    )
    rows, loss = batch(settings), partial(actor_loss, algorithm=Algorithm())
    turns.next()
    while True:
        metrics = engine.step(rows, loss, MicroBatches())
        assert metrics is not None
        turns.next({"grad_norm": metrics.finalize()["grad_norm"]})


def transformers(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    model, rows = network(settings), batch(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    tokens, mask = rows.inputs["tokens"], rows.action_mask
    present = (torch.arange(tokens.shape[1]) < rows.inputs["lengths"][:, None]).long() if settings.mixed else None
    row, column = mask.nonzero(as_tuple=True)
    old, advantages = rows.log_probs[mask], rows.advantages[mask]
    turns.next()
    while True:
        states = model.model(input_ids=tokens, attention_mask=present, use_cache=False).last_hidden_state
        logits = model.lm_head(states[row, column - 1])
        log_probs = logits.gather(1, tokens[row, column][:, None]).squeeze(1) - logits.logsumexp(-1)
        ratio = (log_probs - old).exp()
        loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.next({"grad_norm": float(norm)})


def main() -> None:
    parser = new_parser(__doc__, rounds=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of the mini-batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest, prompt included")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.length, options.rounds = 4, 64, 2
    found = machine(("torch", "transformers", "megatron-core"))
    results = {}
    for case, target in TARGETS.items():
        shared = {"rows": options.rows, "length": options.length, "mixed": case == "mixed", "quick": options.quick}
        entries = {TRANSFORMERS: Entry(transformers, argparse.Namespace(**shared), options.threads)}
        for backend in BACKENDS:
            entries[backend] = Entry(ours, argparse.Namespace(**shared, backend=backend), options.threads)
        laps = results[case] = race(entries, options.warm_up, options.rounds)
        norms = {name: round(of_one[0].numbers["grad_norm"], 5) for name, of_one in laps.items()}
        print(f"\n{case} lengths; gradient norms of the first measured step: {norms}")
        for name, of_one in laps.items():
            seconds, cpu = (statistics.median(times) for times in zip(*(lap[:2] for lap in of_one), strict=True))
            print(f"  {name}: {seconds:.3g} s, {cpu:.3g} CPU seconds")
        for backend in BACKENDS:
            print_verdict(
                f"  {backend}, times as fast as transformers", ratios(laps[backend], laps[TRANSFORMERS]), target
            )
    write_json(options.json, {"benchmark": "training", "options": vars(options), "machine": found, "laps": results})


if __name__ == "__main__":
    main()
