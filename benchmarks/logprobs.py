"""Log-probabilities and values of a rollout batch, as they are recomputed before an update: seconds and peak memory.

* Seconds: rows from an eighth of the longest to all of it. transformers pads them, ours packs them. A model of the
  shape of SmolLM2-135M with random weights, float32, one rank, no gradient; both compute logits of the responses only.
* Peak memory: a batch of 2,048 tokens and one of 8,192 through a small model with a large vocabulary, all rows at once.
  What the pass takes beyond what was there before, in a process of its own. Plain logits grow by tokens times
  vocabulary.

Not covered: several ranks, GPUs.

    python benchmarks/logprobs.py [--rows 8] [--length 256] [--rounds 4] [--warm-up 1] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _common import Entry, Turns, machine, new_parser, print_seconds, print_verdict, race, ratios, write_json
from _language import (
    BACKENDS,
    QUICK,
    SMOLLM2,
    TRANSFORMERS,
    WIDE,
    action_log_probs,
    action_states,
    batch,
    network,
    row_lengths,
    training_engine,
)

TARGET = 1.5
SMALL_GROWTH = 0.1  # of what plain logits grow by: the engines' peak must not follow tokens times vocabulary
ROW = 512  # tokens of each row in the measurement of memory
TOKENS = (2048, 8192)


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    from rl_platform.engines.training.base import MicroBatches
    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    trained = training_engine(settings.backend, settings.shape, values=settings.values)
    rows = batch(settings.lengths, settings.shape["vocab_size"])
    turns.next()
    while True:
        outputs = trained.evaluate(rows, MicroBatches())
        found = outputs.values if settings.values else outputs.log_probs
        turns.next({"sum": float(found.sum())})


def transformers(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    model, rows = network(settings.shape), batch(settings.lengths, settings.shape["vocab_size"])
    head = torch.nn.Linear(settings.shape["hidden_size"], 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    turns.next()
    while True:
        with torch.no_grad():
            found = head(action_states(model, rows)) if settings.values else action_log_probs(model, rows)
        turns.next({"sum": float(found.sum())})


def peak_bytes(name: str, tokens: int, shape: dict[str, int]) -> int:
    """What one pass takes at its fullest moment beyond what this process held before."""
    import torch

    from rl_platform.engines.training.base import MicroBatches

    torch.set_num_threads(1)
    rows, small = (batch([ROW] * count, shape["vocab_size"]) for count in (tokens // ROW, 1))
    run: Callable[[Any], Any]
    if name == TRANSFORMERS:
        run = torch.no_grad()(partial(action_log_probs, network(shape)))
    else:
        run = partial(training_engine(name, shape).evaluate, micro_batches=MicroBatches())
    run(small)  # libraries that load at the first pass
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory("VmHWM")
    run(rows)
    return _memory("VmHWM") - before


def _memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


def measure_memory(shape: dict[str, int]) -> dict[str, list[int]]:
    """Peaks of every contestant for TOKENS; each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    logits = [tokens * 3 // 4 * shape["vocab_size"] * 4 for tokens in TOKENS]  # of the responses, float32
    print(f"\npeak memory of log-probs, vocabulary of {shape['vocab_size']:,}, {TOKENS[0]:,} and {TOKENS[1]:,} tokens")
    print(f"  logits of all responses: {logits[0] / 2**20:,.0f} and {logits[1] / 2**20:,.0f} MiB")
    found = {}
    for name in (TRANSFORMERS, *BACKENDS):
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            peaks = found[name] = [pool.submit(peak_bytes, name, tokens, shape).result() for tokens in TOKENS]
        growth = (peaks[1] - peaks[0]) / (logits[1] - logits[0])
        met = "met" if growth <= SMALL_GROWTH else "missed"
        verdict = "" if name == TRANSFORMERS else f"; at most {SMALL_GROWTH}: {met}"
        line = f"{peaks[0] / 2**20:,.0f} and {peaks[1] / 2**20:,.0f} MiB"
        print(f"  {name}: {line}, grows by {growth:.2f} of what logits grow by{verdict}")
    return found


def main() -> None:
    parser = new_parser(__doc__, rounds=4)
    parser.add_argument("--rows", type=int, default=8, help="sequences of the batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest, prompt included")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.length, options.rounds = 4, 64, 2
    found = machine(("torch", "transformers", "megatron-core"))
    shape = QUICK if options.quick else SMOLLM2
    lengths = row_lengths(options.rows, options.length, mixed=True)
    results = {}
    for case in ("log-probs", "values"):
        shared = {"lengths": lengths, "shape": shape, "values": case == "values"}
        entries = {TRANSFORMERS: Entry(transformers, argparse.Namespace(**shared), options.threads)}
        for backend in BACKENDS:
            entries[backend] = Entry(ours, argparse.Namespace(**shared, backend=backend), options.threads)
        laps = results[case] = race(entries, options.warm_up, options.rounds)
        sums = {name: round(of_one[0].numbers["sum"], 3) for name, of_one in laps.items()}
        print(f"\n{case}, lengths {lengths[0]} to {lengths[-1]}; their sums: {sums}")
        print_seconds(laps)
        for backend in BACKENDS:
            faster = ratios(laps[backend], laps[TRANSFORMERS])
            print_verdict(f"  {backend}, times as fast as padded rows", faster, TARGET)
    peaks = measure_memory(WIDE | {"vocab_size": 4096} if options.quick else WIDE)
    write_json(
        options.json,
        {"benchmark": "logprobs", "options": vars(options), "machine": found, "laps": results, "peaks": peaks},
    )


if __name__ == "__main__":
    main()
