"""The report of `--plan` as text: the placement, then memory, one step, batches and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl_platform.placement.estimates.hardware import GIB
from rl_platform.placement.estimates.memory import Memory
from rl_platform.placement.estimates.step_moves import phases_of
from rl_platform.placement.estimates.streaming import part_rows
from rl_platform.planner.placement_text import render
from rl_platform.planner.report import DeviceUse, Report, names_of
from rl_platform.planner.step_timeline import duration, gantt

_COLUMNS = ("weights", "published", "graphs", "gradients", "optimizer", "activations", "kv_cache")


def report_text(report: Report) -> str:
    """Returns the report. Lines are at most about 110 characters wide, except for warnings."""
    parts = (_memory(report), _step(report), _moves(report), _batches(report), _warnings(report))
    sections = [list(part) for part in parts]
    texts = [render(report.placement, report.inventory), *("\n".join(lines) + "\n" for lines in sections if lines)]
    return "\n".join(texts)


def _memory(report: Report) -> Iterator[str]:
    """Yields one block for all GPUs that are used alike."""
    alike: dict[object, list[DeviceUse]] = {}
    for use in report.devices:
        if use.usage.peak:
            kind = (use.number is None, use.usage.peak, tuple(use.usage.components.items()))
            alike.setdefault(kind, []).append(use)
    if not alike:
        return
    blocks = [(names_of(uses, report.inventory), uses[0]) for uses in alike.values()]
    margin = max(len(name) for name, _ in blocks)
    yield f"Memory in GiB, estimated ({_limits(report)}):"
    memories = [memory for _, use in blocks for memory in use.usage.components.values()]
    held, graphs = any(memory.published for memory in memories), any(memory.graphs for memory in memories)
    left_out = {name for name, shown in (("published", held), ("graphs", graphs)) if not shown}
    columns = [name for name in _COLUMNS if name not in left_out]
    heads = "".join(f"{name.replace('kv_cache', 'KV cache'):>13}" for name in columns)
    yield f"  {'':{margin}}  {'':12}{heads}{'sum':>9}"
    for name, use in blocks:
        label = name
        for component, memory in use.usage.components.items():
            if memory.total:
                yield f"  {label:{margin}}  {component:12}{_cells(memory, columns)}{_gib(memory.total):>9}"
                label = ""
        if use.usage.processes:
            yield f"  {label:{margin}}  {'processes':12}{'':{13 * len(columns)}}{_gib(use.usage.processes):>9}"
            label = ""
        capacity = report.capacity(use)
        share = f"  {use.usage.peak / capacity:.0%}" if capacity else ""
        yield f"  {label:{margin}}  {'at most':12}{'':{13 * len(columns)}}{_gib(use.usage.peak):>9}{share}"
        if use.expected.peak != use.usage.peak:  # lengths are known
            yield f"  {'':{margin}}  {'mean lengths':12}{'':{13 * len(columns)}}{_gib(use.expected.peak):>9}"
    stay = "stay" if not report.order.leaving else "leave as shown below"
    beside = "; a reward model scores while the caches exist" if "reward" in report.shapes else ""
    passing = f"of gradients, activations and caches only one component's exist at a time{beside}"
    yield f"  weights and optimizer {stay}; {passing}"
    if held:
        yield "  published: the whole model, gathered or in shared memory for the rollout; it stays"
    if graphs:
        yield "  graphs: the memory pool of the rollout's CUDA graphs; it stays between generations"
    yield from (f"  {text}" for text in report.decisions)
    for name, shape in report.shapes.items():
        if shape.active_parameters < shape.parameters:
            total, active = shape.parameters / 1e9, shape.active_parameters / 1e9
            yield f"  {name}: {total:.3g} billion parameters, {active:.3g} billion of which a token goes through"


def _limits(report: Report) -> str:
    if report.device.kind == "cpu":
        owner = f"each {report.inventory.noun}" if report.inventory.is_emulated else "a node"
        return f"{owner} has {_gib(report.device.memory)}" if report.device.memory else f"main memory of {owner}"
    if report.device.memory is None:
        return "GPUs of unknown kind"
    gpus = {use.node: report.gpu(use) for use in report.devices if use.number is not None}.values()
    return ", ".join(dict.fromkeys(f"{gpu.kind} has {_gib(gpu.memory or 0)}" for gpu in gpus))


def _cells(memory: Memory, columns: Sequence[str]) -> str:
    return "".join(f"{_gib(getattr(memory, name)):>13}" for name in columns)


def _gib(size: int) -> str:
    if size == 0:
        return "."
    gib = size / GIB
    if gib < 0.001:
        return "<0.001"
    return f"{gib:.3f}" if gib < 1 else f"{gib:.1f}" if gib >= 100 else f"{gib:.2f}"


def _step(report: Report) -> Iterator[str]:
    if not report.spans:
        return
    device = report.device
    on = {"cpu": "the CPU"}.get(device.kind, device.kind if device.known else f"{device.kind}, as if it were an h100")
    yield f"One step, estimated for {on}: {duration(report.seconds)}"
    yield from gantt(report.spans)
    yield from _overlap(report)
    yield from _other_work(report)
    if report.streams:
        names = ", ".join(name for name in report.layout.parts if name in report.streams)
        rows = part_rows(report.config, report.layout, report.streams)
        yield f"  {names} stream: every {rows} finished responses are evaluated while others are generated"


def _overlap(report: Report) -> Iterator[str]:
    ahead = report.overlap
    if ahead is None:
        return
    age = f"weights {ahead.staleness} update{'s' if ahead.staleness > 1 else ''} old"
    yield f"  generation is ahead of training: a step every {duration(ahead.seconds)}, {age}"
    keys: dict[str, str] = {}
    for name, part in report.layout.parts.items():
        keys.setdefault(part.key, name)
    shares = (f"{key} {ahead.idle[name]:.0%} ({ahead.alternating[name]:.0%})" for key, name in keys.items())
    yield f"  idle share of devices (if they alternated): {'; '.join(shares)}"


def _other_work(report: Report) -> Iterator[str]:
    """Yields the work outside the phases, and what the estimate is based on."""
    for work in report.other_work:
        often = "once" if work.name == "start" else f"every {work.steps} steps" if work.steps > 1 else "every step"
        yield f"  {work.name} {often}: {duration(work.seconds)}, {duration(work.per_step)} per step"
    if report.other_work:
        yield f"  a step with its share of these: {duration(report.mean_seconds)}"
    if report.config.runner.task_type == "reasoning":
        yield f"  lengths: {report.lengths}"
    yield f"  {report.source or 'rates: of data sheets; --plan=calibrate measures this machine'}"


def _moves(report: Report) -> Iterator[str]:
    """Yields the moves of each phase for every group of GPUs that are used alike."""
    alike: dict[frozenset[str], list[DeviceUse]] = {}
    for use in report.devices:
        if leaving := frozenset(report.order.leaving & use.ranks.keys()):
            alike.setdefault(leaving, []).append(use)
    if not alike:
        return
    yield "Offload: components moved to host memory before a phase, and back to the GPU for it:"
    margin = max(len(names_of(uses, report.inventory)) for uses in alike.values())
    for leaving, uses in alike.items():
        label = names_of(uses, report.inventory)
        for moved in phases_of(report.order):
            out, back = (
                [str(move) for move in moves if move.component in leaving] for moves in (moved.leaves, moved.comes)
            )
            parts = [f"{word}: {', '.join(moves)}" for word, moves in (("out", out), ("in", back)) if moves]
            if parts:
                yield f"  {label:{margin}}  {moved.phase:12}  {'; '.join(parts)}"
                label = ""


def _batches(report: Report) -> Iterator[str]:
    yield "Batches:"
    yield from (f"  {division}" for division in report.divisions)


def _warnings(report: Report) -> Iterator[str]:
    if report.warnings:
        yield "Warnings:"
        yield from (f"  {warning}" for warning in report.warnings)
