"""Seconds of an optimizer step with either training backend, next to a plain transformers loop in the same run.

A model of the shape of SmolLM2-135M with random weights, float32, one rank: log-probabilities of the responses, the
clipped policy loss, backward, gradient clipping and AdamW, without recomputation. `--bfloat16` adds fsdp with
`dtype: bfloat16` and its ratio to our float32. Two cases:

* equal: rows of one length. Nothing can be saved, so the ratio is the price of the backend.
* mixed: lengths from an eighth of it to all of it. transformers pads the rows, ours packs them.

transformers gets its scaled-dot-product attention and the fused AdamW that ours use, and makes the logits of the
responses only. Not covered: several ranks, GPUs, Transformer Engine.

    python benchmarks/training.py [--rows 4] [--length 256] [--rounds 4] [--warm-up 1] [--bfloat16] [--quick]
        [--json FILE]
"""

from __future__ import annotations

import argparse
from functools import partial

from _common import Entry, Turns, machine, new_parser, print_seconds, print_verdict, race, ratios, write_json
from _language import (
    BACKENDS,
    QUICK,
    SMOLLM2,
    TRANSFORMERS,
    action_log_probs,
    batch,
    network,
    row_lengths,
    training_engine,
)

HALF = "fsdp, bfloat16"
TARGETS = {"equal": 1 / 1.15, "mixed": 1.5}


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.algorithms.losses import actor_loss
    from rl_platform.config.schema.algorithm import Algorithm
    from rl_platform.engines.training.base import MicroBatches
    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    engine = training_engine(settings.backend, settings.shape, dtype=getattr(torch, settings.dtype))
    rows, loss = batch(settings.lengths, settings.shape["vocab_size"]), partial(actor_loss, algorithm=Algorithm())
    turns.next()
    while True:
        metrics = engine.step(rows, loss, MicroBatches())
        assert metrics is not None
        turns.next({"grad_norm": metrics.finalize()["grad_norm"]})


def transformers(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    model, rows = network(settings.shape), batch(settings.lengths, settings.shape["vocab_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    old, advantages = rows.log_probs[rows.action_mask], rows.advantages[rows.action_mask]
    turns.next()
    while True:
        ratio = (action_log_probs(model, rows) - old).exp()
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
    parser.add_argument("--bfloat16", action="store_true", help="fsdp also with dtype: bfloat16, beside its float32")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.length, options.rounds = 4, 64, 2
    found = machine(("torch", "transformers", "megatron-core"))
    results = {}
    for case, target in TARGETS.items():
        lengths = row_lengths(options.rows, options.length, mixed=case == "mixed")
        shared = {"lengths": lengths, "shape": QUICK if options.quick else SMOLLM2}
        entries = {TRANSFORMERS: Entry(transformers, argparse.Namespace(**shared), options.threads)}
        for backend in BACKENDS:
            settings = argparse.Namespace(**shared, backend=backend, dtype="float32")
            entries[backend] = Entry(ours, settings, options.threads)
        if options.bfloat16:
            settings = argparse.Namespace(**shared, backend="fsdp", dtype="bfloat16")
            entries[HALF] = Entry(ours, settings, options.threads)
        laps = results[case] = race(entries, options.warm_up, options.rounds)
        norms = {name: round(of_one[0].numbers["grad_norm"], 5) for name, of_one in laps.items()}
        print(f"\n{case} lengths; gradient norms of the first measured step: {norms}")
        print_seconds(laps)
        for backend in BACKENDS:
            print_verdict(
                f"  {backend}, times as fast as transformers", ratios(laps[backend], laps[TRANSFORMERS]), target
            )
        if options.bfloat16:
            print_verdict(f"  {HALF}, times as fast as float32", ratios(laps[HALF], laps["fsdp"]), 2.5)
    write_json(options.json, {"benchmark": "training", "options": vars(options), "machine": found, "laps": results})


if __name__ == "__main__":
    main()
