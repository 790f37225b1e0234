"""The report of `--plan` as a picture: nodes and their GPUs with the components on them, and one step below.

Plain SVG without scripts or fonts of its own; colours follow the reader's light or dark setting. Neighbouring nodes
that are used alike are drawn once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from rl_platform.placement.estimates.hardware import GIB
from rl_platform.planner.placement_text import number_ranges
from rl_platform.planner.report import DeviceUse, Report
from rl_platform.planner.step_timeline import duration

WIDTH, MARGIN = 960, 24
CELL, BAND, GAP = 64, 20, 6  # a GPU's width, height of a component in it, space between GPUs
MOST_NODES = 12  # groups of nodes that are drawn; the rest is counted
LABELS = 190  # left of the bars
COLOURS = {
    "actor": "#4c78a8",
    "actor_critic": "#4c78a8",
    "critic": "#e8833a",
    "reference": "#9a75c9",
    "rollout": "#4f9d55",
    "reward": "#b8962e",
    "env": "#3fa3a0",
}
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.small { font-size: 11px; fill: #57606a; }
.on { font-size: 11px; fill: #ffffff; }
.title { font-size: 15px; font-weight: 600; }
.page { fill: #ffffff; }
.node { fill: #f6f8fa; stroke: #d0d7de; }
.gpu { fill: #ffffff; stroke: #afb8c1; }
.grid { stroke: #d0d7de; }
.over { fill: #cf222e; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.small { fill: #9198a1; }
.page { fill: #0d1117; }
.node { fill: #161b22; stroke: #30363d; }
.gpu { fill: #0d1117; stroke: #484f58; }
.grid { stroke: #30363d; }
.over { fill: #ff7b72; }
}"""


@dataclass
class _Canvas:
    """Elements drawn so far, and the height that is used."""

    elements: list[str] = field(default_factory=list)
    bottom: float = MARGIN

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        kind = f' class="{style}"' if style else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.elements.append(f"<text {place}{kind}>{escape(words)}</text>")

    def box(
        self, x: float, y: float, width: float, height: float, *, style: str = "", fill: str = "", tip: str = ""
    ) -> None:
        paint = f'class="{style}"' if style else f'fill="{fill}"'
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"'
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self.elements.append(f"<rect {size} {paint}>{inner}</rect>")

    def line(self, x: float, top: float, bottom: float) -> None:
        self.elements.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" class="grid"/>')


def report_svg(report: Report, step: bool = True) -> str:
    """Returns the picture as one SVG document. step: with the phases of a step."""
    canvas = _Canvas()
    _legend(canvas, report)
    _nodes(canvas, report)
    if step and report.spans:
        _step(canvas, report)
    height = canvas.bottom + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">'
    title = f"<title>Placement of {escape(report.config.runner.experiment_name)}</title>"
    page = f'<rect class="page" width="{WIDTH}" height="{height:.0f}"/>'
    return "\n".join([head, title, f"<style>{_STYLE}</style>", page, *canvas.elements, "</svg>"]) + "\n"


def _legend(canvas: _Canvas, report: Report) -> None:
    nodes, gpus = len(report.inventory.nodes), report.inventory.num_accelerators
    kind = report.device.kind if report.inventory.gpu or report.device.known else "GPU"
    machines = f"{nodes} node{'s' if nodes > 1 else ''}, {gpus or 'no GPU'}{f' x {kind}' if gpus else ''}"
    canvas.text(MARGIN, canvas.bottom + 10, f"{report.config.runner.experiment_name}: {machines}", "title")
    x, y = float(MARGIN), canvas.bottom + 24
    for name in report.placement.components:
        canvas.box(x, y, 12, 12, fill=COLOURS[name])
        ranks = report.placement.world_size(name)
        words = f"{name} ({ranks} rank{'s' if ranks > 1 else ''})"
        canvas.text(x + 18, y + 11, words)
        x += 40 + 7.2 * len(words)
    canvas.bottom = y + 28


def _nodes(canvas: _Canvas, report: Report) -> None:
    """Draws boxes of nodes, side by side in the width of the page."""
    groups = list(_groups(report))
    bands = max((len(use.ranks) for _, uses in groups for use in uses), default=1)
    height = 24 + bands * (BAND + 2) + 44
    x = float(MARGIN)
    for names, uses in groups[:MOST_NODES]:
        fit = (WIDTH - 2 * MARGIN - 2 * GAP) // (CELL + GAP)
        for start in range(0, max(len(uses), 1), fit):
            row = uses[start : start + fit]
            width = max(len(row), 2) * (CELL + GAP) + GAP
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x, canvas.bottom = float(MARGIN), canvas.bottom + height + 10
            canvas.box(x, canvas.bottom, width, height, style="node")
            canvas.text(x + GAP + 2, canvas.bottom + 17, names)
            for position, use in enumerate(row):
                _gpu(canvas, report, use, x + GAP + position * (CELL + GAP), canvas.bottom + 24, height - 30)
            x += width + 10
    canvas.bottom += height + 10
    if len(groups) > MOST_NODES:
        canvas.text(MARGIN, canvas.bottom + 8, f"and {len(groups) - MOST_NODES} more kinds of nodes", "small")
        canvas.bottom += 20


def _groups(report: Report) -> Iterator[tuple[str, list[DeviceUse]]]:
    """Yields a label and the first node's devices for neighbouring nodes that are used alike."""
    by_node: dict[int, list[DeviceUse]] = {}
    for use in report.devices:
        by_node.setdefault(use.node, []).append(use)
    runs: list[tuple[object, list[int]]] = []
    for node, uses in by_node.items():
        kind = [(use.local, {name: len(ranks) for name, ranks in use.ranks.items()}, use.usage.peak) for use in uses]
        if runs and runs[-1][0] == kind:
            runs[-1][1].append(node)
        else:
            runs.append((kind, [node]))
    for _, nodes in runs:
        name = report.inventory.nodes[nodes[0]].name
        if len(nodes) > 1:
            name += f" .. {report.inventory.nodes[nodes[-1]].name}"
        yield name, by_node[nodes[0]]


def _gpu(canvas: _Canvas, report: Report, use: DeviceUse, x: float, y: float, height: float) -> None:
    """Draws a GPU: bands of its components with their ranks, its number and its memory."""
    canvas.box(x, y, CELL, height, style="gpu")
    for index, (name, ranks) in enumerate(use.ranks.items()):
        top = y + 3 + index * (BAND + 2)
        canvas.box(x + 3, top, CELL - 6, BAND, fill=COLOURS[name], tip=f"{name} ranks {number_ranges(ranks)}")
        shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        canvas.text(x + CELL / 2, top + 14, shown, "on", "middle")
    label = "cpu" if use.number is None else f"{report.inventory.noun} {use.number}"
    canvas.text(x + CELL / 2, y + height - 21, label, "small", "middle")
    capacity, peak = report.capacity(use), use.usage.peak
    words = f"{peak / GIB:.1f} GiB" if peak >= 0.05 * GIB else "" if not peak else "<0.1 GiB"
    canvas.text(x + CELL / 2, y + height - 9, words, "over" if capacity and peak > capacity else "small", "middle")
    if capacity and peak:
        canvas.box(x + 3, y + height - 6, CELL - 6, 3, style="node")
        filled = min(peak / capacity, 1.0) * (CELL - 6)
        full = peak > capacity
        canvas.box(x + 3, y + height - 6, filled, 3, style="over" if full else "", fill="#57a0d3")


def _step(canvas: _Canvas, report: Report) -> None:
    """Draws the phases of one step as bars on its time."""
    top = canvas.bottom + 24
    on = "CPU" if report.device.kind == "cpu" else report.device.kind
    canvas.text(MARGIN, top, f"One step, estimated for {on}: {duration(report.seconds)}", "title")
    top += 14
    left, width = MARGIN + LABELS, WIDTH - 2 * MARGIN - LABELS - 70
    row = BAND + 6
    for quarter in range(5):
        x = left + width * quarter / 4
        canvas.line(x, top, top + len(report.spans) * row + 6)
        seconds = report.seconds * quarter / 4
        canvas.text(x, top + len(report.spans) * row + 20, duration(seconds) if quarter else "0", "small", "middle")
    for index, span in enumerate(report.spans):
        y = top + 6 + index * row
        canvas.text(MARGIN, y + 14, f"{span.component}: {span.phase}")
        start, stop = (left + width * moment / report.seconds for moment in (span.start, span.stop))
        tip = span.note or f"{duration(span.seconds)}, bound by {span.bound}"
        canvas.box(start, y, max(stop - start, 2), BAND, fill=COLOURS[span.component], tip=tip)
        canvas.text(max(stop, start + 2) + 6, y + 14, duration(span.seconds), "small")
    canvas.bottom = top + len(report.spans) * row + 20
