"""The output of `--plan=search`: the best placements with reasons, and the lines of a config that select the first."""

from __future__ import annotations

import json

import yaml

from rl_platform.config.layers import put_at
from rl_platform.config.source import Tree
from rl_platform.placement.estimates.hardware import GIB
from rl_platform.placement.estimates.occupancy import NEARLY_FULL
from rl_platform.placement.inventory import Inventory
from rl_platform.planner.candidates import Candidate, SearchResult
from rl_platform.planner.config_variants import Changes
from rl_platform.planner.step_timeline import duration, step_seconds


def search_text(result: SearchResult, inventory: Inventory, present: float, source: str = "", rates: str = "") -> str:
    """Returns the best split of every grouping with reasons, the present placement, and the YAML of the best.

    `present`: seconds of a step on the config's own placement; 0 if unknown. `source`: the run that corrected the
    predictions. `rates`: the source of the rates.
    """
    noun = result.device.kind if result.device.known and not result.mixed else inventory.noun
    if result.device.kind == "cpu":
        noun = inventory.noun if inventory.is_emulated else "node"
    cluster = f"{result.available} {noun}{'s' if result.available > 1 else ''}"
    unmeasured = "not measured: --calibrate RUN corrects it by an earlier run"
    basis = f"corrected by {source}" if source else rates or unmeasured
    lines = [f"Placements on {cluster} by predicted seconds per step ({basis})", ""]
    shown = result.best_of_groupings
    for place, candidate in enumerate(shown, 1):
        text = ", ".join(f"{key}: {value}" for key, value in candidate.component_placement.items())
        lines += [f"{place:3}  {duration(candidate.seconds):>8}  {text}", f"{'':15}{_why(candidate, result)}"]
        if candidate.changes:
            lines.append(f"{'':15}with {_changes_text(candidate.changes)}")
    if present:
        lines += ["", f"{duration(present):>13}  the placement of the config"]
    if (ahead := result.best_ahead) is not None:
        text = ", ".join(f"{key}: {value}" for key, value in ahead.component_placement.items())
        lines += ["", "Faster, but with other results, because responses are one update older:"]
        lines += [f"{duration(ahead.seconds):>13}  {text}", f"{'':15}{_why(ahead, result)}"]
        lines.append(f"{'':15}with {_changes_text(ahead.changes)}")
    lines += ["", *_remarks(result, len(shown))]
    lines += ["To use the first:", *placement_yaml(shown[0], len(inventory.nodes))]
    return "\n".join(lines) + "\n"


def _changes_text(changes: Changes) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in changes.items())


def placement_yaml(candidate: Candidate, nodes: int) -> list[str]:
    """Returns the lines of a config that differ, for `nodes` nodes."""
    rows = [f'    {key}: "{value}"' for key, value in candidate.component_placement.items()]
    lines = ["cluster:", f"  num_nodes: {nodes}", "  component_placement:", *rows]
    tree: Tree = {}
    for key, value in candidate.changes.items():
        put_at(tree, key, value)
    return lines + (yaml.safe_dump(tree, sort_keys=False).splitlines() if tree else [])


def _why(candidate: Candidate, result: SearchResult) -> str:
    """Returns the phase that takes most of the time, and the peak of the fullest device."""
    counted = [span for span in candidate.spans if not span.note]
    longest = max(counted, key=lambda span: span.seconds)
    beside = [
        span.phase
        for span in counted
        if span.phase != longest.phase and span.start < longest.stop and longest.start < span.stop and span.seconds
    ]
    share = longest.seconds / step_seconds(candidate.spans)
    parts = [f"{longest.phase} takes {share:.0%} ({longest.bound})"]
    parts += [f"beside it {', '.join(beside)}"] if beside else []
    limit = f" of {result.device.memory / GIB:.0f}" if result.device.memory and not result.mixed else ""
    parts += [f"at most {candidate.peak / GIB:.1f}{limit} GiB", f"devices idle {candidate.idle(result.available):.0%}"]
    if candidate.devices < result.available:
        parts[-1] += f", {result.available - candidate.devices} of them always"
    return "; ".join(parts)


def _remarks(result: SearchResult, shown: int) -> list[str]:
    more = len(result.candidates) - shown
    others = f"{more} other split{'s fit' if more > 1 else ' fits'} as well"
    lines = [f"Of each grouping the best split is shown; {others}."] if more > 0 else []
    if result.too_large:
        memory = "their GPUs" if result.mixed else f"{(result.device.memory or 0) / GIB:.1f} GiB"
        lines.append(
            f"{result.too_large} do not fit into {memory} with {1 - NEARLY_FULL:.0%} to spare; "
            f"the leanest of them needs {result.smallest_peak / GIB:.1f} GiB."
        )
    if not result.device.known:
        lines.append("The kind of GPU is not known: memory has no limit here, and speeds are an h100's.")
    return [*lines, ""] if lines else []
