"""The terminal view of a finished run as an SVG: `python -m rl_platform.launch.tools.snapshot RUN -o view.svg`."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rl_platform.errors import DataError, PlatformError
from rl_platform.interrupts import handle_signals
from rl_platform.launch.headline import History, headline_of_run
from rl_platform.launch.view import LiveView
from rl_platform.metrics import RunInfo, read_metrics
from rl_platform.standard_streams import never_fail


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a bad command line, 65 for a run that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_platform.launch.tools.snapshot", description="terminal view as SVG"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("-o", "--output", type=Path, default=Path("view.svg"))
    parser.add_argument("--title", default="platform-launch")
    options = parser.parse_args(arguments)
    try:
        svg = snapshot(options.run, options.title)
    except PlatformError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(svg, encoding="utf-8")
    print(options.output)
    return 0


def snapshot(run: Path, title: str, width: int = 100) -> str:
    """The view as it stood after the last step, with the last sample. Raises DataError for a run without steps."""
    rows = read_metrics(run)
    if not rows:
        raise DataError(f"{run}: no finished step in metrics.jsonl")
    names = {name for row in rows for name in row}
    last = int(rows[-1]["step"])
    console = Console(file=io.StringIO(), record=True, width=width, height=40, force_terminal=True)
    view = LiveView(console)
    history = History(headline_of_run(run, names), last)
    for row in rows:
        history.add(int(row["step"]), row)
    view.prepare(RunInfo(run.name, "", run, last), history)
    samples = run / "samples.jsonl"
    if samples.exists() and (lines := samples.read_text(encoding="utf-8").splitlines()):
        sample = json.loads(lines[-1])
        view.samples(last, [(sample["prompt"], sample["response"], sample["reward"])])
    console.print(view)
    return console.export_svg(title=title)


if __name__ == "__main__":
    handle_signals()
    never_fail()
    sys.exit(main())
