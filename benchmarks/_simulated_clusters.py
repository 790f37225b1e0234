"""The section of docs/results/max_staleness.md about 64 and 1,024 GPUs, by the plan with data sheets."""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from plan_accuracy import ROOT

from rl_platform.launch.placed_config import load
from rl_platform.launch.tools.timeline import covered
from rl_platform.placement.estimates.workload import running_sequences
from rl_platform.planner.basis import Basis
from rl_platform.planner.lengths import decoding, expected, sampled
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.simulation import RunModel, model_of, simulate

SIMULATED = "## Simulated clusters"
SIMULATED_STEPS = 50  # that count: before them the buffer fills, after them nothing is left to generate
FILL = 10  # steps that only fill the buffer
RECIPE = "reasoning/recipes/deepseek_r1_7b_dapo_64gpu.yaml"


def lengths_of(run: Path, most: int) -> tuple[int, ...]:
    """Returns the characters of the responses that a run logged, as shares of the longest one times `most`.

    A response that was cut at the limit has `most`.
    """
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [line for line in lines if "response" in line]
    longest = max(1, max(len(row["response"]) for row in rows))
    scaled = (max(1, round(len(row["response"]) * most / longest)) for row in rows)
    cut = [row.get("finish_reason") == "length" for row in rows]
    return tuple(sorted(most if ended else length for length, ended in zip(scaled, cut, strict=True)))


def larger(devices: int, ahead: int, lengths: Sequence[int]) -> Report:
    """The plan of the recipe on so many GPUs, half of which generate. lengths: of responses, in tokens."""
    nodes, half, factor = devices // 8, devices // 2, devices // 64
    halves = {
        "actor,critic,reference": f"0-{half - 1}",
        "rollout": f"{half}-{devices - 1}",
        "reward": {"node_group": "node", "placement": f"0-{nodes - 1}:0-{nodes * 8 - 1}"},
    }
    keys = [
        f"cluster.inventory={{nodes: {nodes}, gpus_per_node: 8, gpu: h100}}",
        f"cluster.component_placement={json.dumps(halves)}",
        f"data.train_batch_size={2048 * factor}",
        f"data.mini_batch_size={512 * factor}",
        f"runner.max_staleness={ahead}",
    ]
    loaded, placement, inventory = load(str(ROOT / "configs" / RECIPE), keys)
    known = replace(expected(loaded.config), responses=sampled(lengths))
    return plan_report(loaded.config, placement, inventory, Basis(lengths=known))


def drawn(report: Report, lengths: Sequence[int], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of generation and of the learners in each simulated step, in multiples of those of the plan.

    The slot of a finished response takes the next one, as in `planner.lengths.decoding`, and the slowest rank decides.
    """
    draw, ranks = random.Random(0), report.layout.parts["rollout"].ranks
    share = -(-report.config.rows_per_step // ranks)
    running = min(running_sequences(report.config, ranks), share)
    planned = sum(taken for _, taken in decoding(report.lengths.responses, share, running))
    longest, tokens = [], []
    for _ in range(steps):
        rows = draw.choices(lengths, k=ranks * share)
        ends = []
        for first in range(0, len(rows), share):
            slots = rows[first : first + running]
            heapq.heapify(slots)
            for row in rows[first + running : first + share]:
                heapq.heapreplace(slots, slots[0] + row)
            ends.append(max(slots))
        longest.append(max(ends) / planned)
        tokens.append(statistics.fmean(rows) / report.lengths.response)
    return longest, tokens


def simulated(run: Path, aheads: Sequence[int]) -> Iterator[str]:
    """The section, for each k of `aheads`. run: with the responses whose lengths are drawn."""
    most = load(str(ROOT / "configs" / RECIPE), [])[0].config.data.max_response_length
    lengths = lengths_of(run, most)
    cut = sum(length == most for length in lengths) / len(lengths)
    yield SIMULATED
    yield ""
    yield (
        f"`python benchmarks/staleness.py simulate --lengths RUN`, {datetime.now(UTC).date().isoformat()}: "
        f"{SIMULATED_STEPS} steps after the first {FILL} of `{RECIPE}`, by the plan with data sheets. "
        "Nothing was measured on GPUs. Half of the GPUs generate; all are equally fast, and none fails. "
        f"Responses are drawn from {len(lengths):,} that a tiny model on a CPU generated, scaled to "
        f"at most {most:,} tokens: mean {statistics.fmean(lengths):,.0f}, median {statistics.median(lengths):,.0f}, "
        f"{cut:.0%} of the greatest length."
    )
    yield ""
    yield "| GPUs | k | step | steps/s against k = 0 | idle: actor, critic, reference | idle: rollout |"
    yield "|---|---|---|---|---|---|"
    for devices in (64, 1024):
        longest, tokens = drawn(larger(devices, 0, lengths), lengths, FILL + SIMULATED_STEPS + max(aheads))
        alternating, rows = 0.0, dict[tuple[str, ...], list[int]]()
        for ahead in aheads:
            model = model_of(larger(devices, ahead, lengths))
            still = replace(model, mtbf=math.inf, validation=0.0, checkpoint=0.0, start=0.0, steps=len(tokens))
            factors = {name: longest if name == "generate" else tokens for name in model.works} | {"sync weights": None}
            outcome = simulate(still, 1, partial(seconds_of, model, factors))
            begin, end = outcome.ends[FILL - 1], outcome.ends[FILL + SIMULATED_STEPS - 1]
            took = (end - begin) / SIMULATED_STEPS
            alternating = alternating or took
            cells = [f"{took:.0f} s", f"{alternating / took:.2f}"]
            for names in (("actor", "critic", "reference"), ("rollout",)):
                spans = (
                    (max(event.start, begin), min(event.stop, end))
                    for event in outcome.events
                    if event.component in names
                )
                cells.append(f"{1 - covered((a, b - a) for a, b in spans if a < b) / (end - begin):.0%}")
            rows.setdefault(tuple(cells), []).append(ahead)
        for cells_of, equal in rows.items():  # a line for all k with equal results
            yield f"| {devices:,} | {', '.join(map(str, equal))} | {' | '.join(cells_of)} |"
    yield ""


def seconds_of(model: RunModel, factors: Mapping[str, Sequence[float] | None], phase: str, step: int) -> float:
    factor = factors[phase]
    return model.works[phase].seconds * (1.0 if factor is None else factor[step])
