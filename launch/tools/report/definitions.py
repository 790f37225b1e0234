"""The definitions of all metrics, read from metrics.yaml: for the report, and as the page docs/metrics.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

_HEAD = """\
# Metrics

Every metric of `metrics.jsonl`. `rl-platform metrics` prints this page; [the report](report.md) shows the same texts.
`<...>` stands for one name. Ranges are those of a healthy run, where there is such a range.
"""


@dataclass(frozen=True)
class MetricDefinition:
    """name: of the metric, or a pattern with <placeholders>. means: what it is. unit, good: may be empty. source: the
    file that computes it."""

    group: str
    name: str
    means: str
    source: str
    unit: str = ""
    good: str = ""

    def fits(self, metric: str) -> bool:
        """Returns whether a metric has this definition."""
        pattern = "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in _PARTS.findall(self.name))
        return re.fullmatch(pattern, metric) is not None


_PARTS = re.compile(r"<\w+>|[^<]+")


@cache
def definitions() -> tuple[MetricDefinition, ...]:
    """Returns all definitions in the order of the file."""
    groups = yaml.safe_load(files(__package__).joinpath("metrics.yaml").read_text(encoding="utf-8"))
    return tuple(MetricDefinition(group["group"], **each) for group in groups for each in group["metrics"])


def definition_of(metric: str) -> MetricDefinition | None:
    """Returns the first definition that fits a metric; None for a metric of the user's own code."""
    return next((each for each in definitions() if each.fits(metric)), None)


def render() -> str:
    """Returns the definitions as Markdown."""
    lines, group = [_HEAD], ""
    for each in definitions():
        if each.group != group:
            group = each.group
            lines.append(f"\n## {group}\n\n| metric | unit | meaning | good | computed in |\n|---|---|---|---|---|\n")
        cells = (f"`{each.name}`", each.unit, each.means, each.good, f"[{each.source}](../{each.source})")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(lines)
