"""Prints the outcomes of the properties: a table on a terminal, else one line each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_platform.launch.check.property import Outcome

_STYLES = {"passed": "green", "failed": "bold red", "not asked": "dim"}


def print_outcomes(console: Console, outcomes: Sequence[Outcome], seed: int, seconds: float) -> None:
    """Prints one line per property and the number that passed."""
    verdicts = [_verdict(outcome) for outcome in outcomes]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in _STYLES)
    summary = f"{counts}; seed {seed}, {seconds:.1f} s"
    if not console.is_terminal:
        for outcome, verdict in zip(outcomes, verdicts, strict=True):
            console.print(Text(f"{outcome.name}: {_line(outcome, verdict)}"), soft_wrap=True)
        console.print(Text(f"properties: {summary}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for outcome, verdict in zip(outcomes, verdicts, strict=True):
        style = _STYLES[verdict]
        text = Text(outcome.not_asked or outcome.compared, "dim" if outcome.not_asked else "")
        table.add_row(Text(outcome.name), text, Text(_size(outcome)), Text(verdict, style))
    title = Text("properties: left = right, largest difference")
    console.print(Panel(table, title=title, title_align="left", border_style="dim", expand=False))
    console.print(Text(summary))


def _verdict(outcome: Outcome) -> str:
    return "not asked" if outcome.not_asked else "failed" if outcome.failed else "passed"


def _line(outcome: Outcome, verdict: str) -> str:
    if outcome.not_asked:
        return f"not asked of this config ({outcome.not_asked})"
    difference = outcome.difference
    size = "" if difference is None else f", largest difference {_size(outcome)} ({difference.allowed:g} allowed)"
    return f"{verdict}{size}: {outcome.compared}"


def _size(outcome: Outcome) -> str:
    return "" if outcome.difference is None else f"{outcome.difference.apart:.1g}"
