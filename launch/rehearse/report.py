"""The report of a rehearsal: printed at its end, and written as text beside the run's future folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_platform.launch.rehearse.runs import Timed
from rl_platform.launch.rehearse.shrink import Change

LONGEST = 48  # characters of a value


@dataclass
class RehearsalReport:
    """What a rehearsal has shown. as_written: keys of the config with their lines. absent: things that need the cluster
    or that are not installed, with the reason."""

    experiment: str
    as_written: Sequence[tuple[str, str]] = ()
    changes: Sequence[Change] = ()
    absent: Sequence[tuple[str, str]] = ()
    phases: list[Timed] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Returns the sections: title and rows."""
        shrunk = [each for each in self.changes if each.kind == "shrunk"]
        replaced = [each for each in self.changes if each.kind == "replaced"]
        return [
            ("as written", [(", ".join(key for key, _ in self.as_written),)]),
            ("shrunk", [_row(each) for each in shrunk]),
            ("replaced", [_row(each) for each in replaced]),
            ("not exercised", list(self.absent)),
            ("seconds", [(each.name, f"{each.seconds:.1f}") for each in self.phases]),
        ]

    def print(self, console: Console) -> None:
        """Prints panels on a terminal, else one line per row."""
        for title, rows in self.lines():
            if not rows or not rows[0]:
                continue
            if not console.is_terminal:
                for row in rows:
                    console.print(Text(f"{title}: {': '.join(filter(None, row))}"), soft_wrap=True)
                continue
            table = Table.grid(padding=(0, 2))
            for number in range(len(rows[0])):
                table.add_column(overflow="fold", style="bold" if number == 0 and len(rows[0]) > 1 else "")
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(Panel(table, title=Text(title), title_align="left", border_style="dim", expand=False))
        console.print(Text(self.verdict()), soft_wrap=True)

    def verdict(self) -> str:
        return f"rehearsal of {self.experiment} passed in {self.seconds:.0f} s"

    def write(self, path: Path) -> None:
        """Writes the report with the line of every key."""
        parts = [self.verdict()]
        for title, rows in self.lines()[1:]:
            parts += ["", title, *(f"  {': '.join(filter(None, row))}" for row in rows)]
        parts += ["", "as written", *(f"  {where}: {key}" for key, where in self.as_written)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _row(change: Change) -> tuple[str, ...]:
    return change.key, f"{_shown(change.before)} -> {_shown(change.after)}", change.why


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
