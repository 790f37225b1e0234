"""The report of a rehearsal: printed at its end, and written as text and as JSON beside the run's future folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_platform.config import LoadedConfig
from rl_platform.launch.rehearse.rehearsed_runs import Timed
from rl_platform.launch.rehearse.shrink import Change, flat_keys

LONGEST = 40  # characters of a value
SHOWN_S = 0.1  # of a phase inside the runs; shorter ones are left out


@dataclass(frozen=True)
class Line:
    """A written key of the config with its place, and what became of it; `change` is None if it ran as written."""

    where: str
    key: str
    change: Change | None = None


@dataclass(frozen=True)
class RehearsalReport:
    """The results of a rehearsal. absent: things that need the cluster or that are missing here, with the reason.

    phases: of the rehearsal; inside: of the runs, over all steps. cpu_seconds: of all processes.
    """

    experiment: str
    lines: Sequence[Line]
    absent: Sequence[tuple[str, str]]
    phases: Sequence[Timed]
    inside: Sequence[Timed]
    seconds: float
    cpu_seconds: float

    @property
    def verdict(self) -> str:
        return f"rehearsal of {self.experiment} passed in {self.seconds:.0f} s ({self.cpu_seconds:.0f} CPU seconds)"

    def sections(self) -> dict[str, list[tuple[str, ...]]]:
        """Returns the rows of each section by its title."""
        whole = [line for line in self.lines if line.change is None]
        sections: dict[str, list[str]] = {}
        for line in whole:
            section, _, name = line.key.partition(".")
            sections.setdefault(section, []).append(name)
        rows: dict[str, list[tuple[str, ...]]] = {
            f"as written: {len(whole)} of {len(self.lines)} keys": [(k, ", ".join(v)) for k, v in sections.items()]
        }
        for kind, title in (("shrunk", "smaller"), ("replaced", "replaced")):
            rows[title] = [_row(line) for line in self.lines if line.change is not None and line.change.kind == kind]
        rows["not shown here"] = list(self.absent)
        long = ", ".join(f"{each.name} {each.seconds:.1f}" for each in self.inside if each.seconds >= SHOWN_S)
        rows["seconds"] = [*((each.name, f"{each.seconds:.1f}") for each in self.phases), ("inside the runs", long)]
        return rows

    def print(self, console: Console) -> None:
        """Prints panels on a terminal, else the text."""
        if not console.is_terminal:
            console.print(Text(self.text()), soft_wrap=True, end="")
            return
        for title, rows in self.sections().items():
            if not rows:
                continue
            table = Table.grid(padding=(0, 2))
            for number in range(max(map(len, rows))):
                table.add_column(overflow="fold", style="bold" if number == 0 else "")
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(Panel(table, title=Text(title), title_align="left", border_style="dim", expand=False))
        console.print(Text(self.verdict, "green"), soft_wrap=True)

    def text(self) -> str:
        """Returns the sections with one line per row, as `ppo.yaml:6: runner.max_steps: 40 -> 2`."""
        lines: list[str] = []
        for title, rows in self.sections().items():
            if rows:
                lines += [title, *(f"  {': '.join(filter(None, row))}" for row in rows)]
        return "\n".join([*lines, self.verdict, ""])

    def write(self, path: Path) -> None:
        """Writes PATH.txt and PATH.json."""
        path.with_name(f"{path.name}.txt").write_text(self.text(), encoding="utf-8")
        path.with_name(f"{path.name}.json").write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")


def written_lines(loaded: LoadedConfig, changes: Sequence[Change]) -> list[Line]:
    """Returns the keys that the config file and the command line set, in their order."""
    changed = {each.key: each for each in changes}
    keys = flat_keys(loaded.config)
    return [
        Line(where.rpartition("/")[2], key, changed.get(key)) for key, where in loaded.sources.items() if key in keys
    ]


def _row(line: Line) -> tuple[str, ...]:
    assert line.change is not None
    return line.where, line.key, f"{_shown(line.change.before)} -> {_shown(line.change.after)}", line.change.why


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
