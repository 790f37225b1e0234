"""The output of `--plan=simulate`: goodput of a config on its own cluster and on larger ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rl_platform.errors import ConfigError
from rl_platform.planner.report import Report, check_known
from rl_platform.planner.simulation import RunModel, SimulatedRun, model_of, simulate
from rl_platform.planner.step_timeline import duration
from rl_platform.planner.what_if import grown

SIZES = (64, 1024, 10_000)  # devices
MOST_RUNS, MOST_STEPS = 100, 2000  # of a row; a longer run is simulated once
REASONS = ("start", "validate", "save", "failures")  # of lost time, as the simulation counts them
COLUMNS = ("nodes", "restarts", "step", "run", "finished", "kept", "goodput", *REASONS, "other", "interval")


def simulation_text(report: Report, plan: Callable[[Sequence[str]], Report]) -> str:
    """Returns the table. plan: returns the report on the config with overrides.

    Raises ConfigError for an unknown model.
    """
    check_known(report.unknown)
    config, known = report.config, model_of(report)
    count = max(1, min(MOST_RUNS, MOST_STEPS // known.steps))
    assumed, noun = config.cluster.simulation, report.inventory.noun
    lines = [
        f"Simulated: {known.steps} steps, means of {count} run{'s' if count > 1 else ''}, "
        f"runner.seed {config.runner.seed}",
        f"  cluster.simulation: a node fails once in {assumed.node_mtbf_hours:g} h; times of ranks vary by "
        f"{assumed.spread:g}; {assumed.slow_nodes:.3g} of the nodes take {assumed.slow_factor:g} x as long",
        f"  rates: {report.source or 'of data sheets; --plan=calibrate measures this machine'}",
        "",
    ]
    rows: list[tuple[str, ...]] = [("cluster", *COLUMNS)]
    notes: list[str] = []
    for devices, made in _reports(report, plan):
        if isinstance(made, str):
            notes.append(made)
            continue
        model = model_of(made)
        label = f"{devices:,} {noun}{'s' if devices > 1 else ''}" if devices else "no GPU"
        for restarts in sorted({model.restarts, 0}, reverse=True):
            changed = replace(model, restarts=restarts)
            outcomes = [simulate(changed, config.runner.seed + number) for number in range(count)]
            rows.append((label, *_cells(changed, outcomes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "", *notes, *EXPLANATION]) + "\n"


EXPLANATION = (
    "The first cluster is the config's own; on the others placement and batches grow in proportion.",
    "kept: steps in the last checkpoint. goodput: what these take by the plan, as a share of the whole time.",
    "start to failures: shares of lost seconds; other: slow ranks, repeated rollouts, the first rollout of a queue.",
    "interval: steps between checkpoints that would lose least time.",
)


def _reports(report: Report, plan: Callable[[Sequence[str]], Report]) -> Iterator[tuple[int, Report | str]]:
    """Yields the number of devices and the report, or why there is none."""
    own, noun = report.inventory.num_accelerators, f"{report.inventory.noun}s"
    yield own, report
    if not own:
        yield 0, "Larger clusters: declare GPUs with cluster.inventory, or CPU workers with cluster.devices_per_node."
        return
    for size in SIZES:
        if size == own:
            continue
        overrides = grown(report.config, report.inventory, size)
        if overrides is None:
            yield size, f"{size:,} {noun}: placement and batches do not grow to whole numbers."
            continue
        try:
            yield size, plan(overrides)
        except ConfigError as error:
            yield size, f"{size:,} {noun}: {error.problems[0].key}: {error.problems[0].message}"


def _cells(model: RunModel, outcomes: Sequence[SimulatedRun]) -> tuple[str, ...]:
    seconds, kept = sum(one.seconds for one in outcomes), sum(one.kept for one in outcomes)
    lost = {reason: sum(one.lost[reason] for one in outcomes) for reason in REASONS}
    useful = kept * model.useful
    count = len(outcomes)
    other = max(0.0, seconds - useful - sum(lost.values()))
    best = model.best_interval
    return (
        str(len(model.used_nodes)),
        str(model.restarts),
        duration(model.useful),
        duration(seconds / count),
        f"{sum(one.finished for one in outcomes) / count:.0%}",
        f"{kept / count / model.steps:.0%}",
        f"{useful / seconds:.1%}",
        *(f"{lost[reason] / seconds:.1%}" for reason in REASONS),
        f"{other / seconds:.1%}",
        "-" if math.isinf(best) or not best else f"{max(1, round(best)):,}",
    )
