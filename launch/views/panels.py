"""Panels that are printed once: algorithm card and placement at the start, the summary at the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_platform.reporter import RunInfo


def print_start(console: Console, info: RunInfo) -> None:
    """Prints the algorithm card and the placement."""
    if info.card:
        print_lines(console, f"{info.experiment}: algorithm", info.card)
    if info.placement:
        print_placement(console, info.placement)
    if info.resumed_step is not None:
        console.print(f"resumed from step {info.resumed_step}", highlight=False)


def print_lines(console: Console, title: str, lines: Sequence[tuple[str, str]]) -> None:
    """Prints (label, text) lines as a panel; without a terminal as `label: text`, so that logs can be searched."""
    if not console.is_terminal:
        for label, text in lines:
            console.print(Text(f"{label}: {text}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(Text(label), Text(text))
    print_panel(console, title, table)


def print_placement(console: Console, grid: str) -> None:
    """Prints preformatted text as a panel; lines that do not fit are cropped, never wrapped."""
    text = Text(grid.rstrip("\n"), no_wrap=True, overflow="ellipsis")
    if console.is_terminal:
        print_panel(console, "placement", text)
    else:
        console.print(text, soft_wrap=True)


def print_panel(console: Console, title: str, content: RenderableType) -> None:
    """Prints content in a frame."""
    console.print(Panel(content, title=Text(title), title_align="left", border_style="dim", expand=False))


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Returns rows as lines with aligned cells; columns `left` begin at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return [line.rstrip() for line in lines]
