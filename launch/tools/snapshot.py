"""The terminal view of a finished run as an SVG."""

from __future__ import annotations

import io
import re
from collections import deque
from pathlib import Path

from rich.console import Console

from rl_platform.errors import DataError
from rl_platform.launch.tools.named_runs import check_runs
from rl_platform.launch.tools.run_headline import headline_of_run
from rl_platform.launch.views.headline import History
from rl_platform.launch.views.live_view import LiveView
from rl_platform.metrics import read_metrics
from rl_platform.reporter import RunInfo, Sample
from rl_platform.step_lines import read_lines


def snapshot(run: Path, title: str) -> str:
    """Returns the view after the last step, with the last sample. Raises ConfigError for a folder without a run,
    DataError for a run without steps."""
    check_runs([run])
    rows = read_metrics(run)
    if not rows:
        raise DataError(f"{run}: no finished step in metrics.jsonl")
    names = {name for row in rows for name in row}
    last = int(rows[-1]["step"])
    console = Console(file=io.StringIO(), record=True, width=100, height=40, force_terminal=True)
    view = LiveView(console)
    history = History(headline_of_run(run, names), last)
    for row in rows:
        history.add(int(row["step"]), row)
    view.prepare(RunInfo(run.name, "", run, last), history)
    samples = run / "samples.jsonl"
    for sample in deque(read_lines(samples), maxlen=1) if samples.is_file() else ():
        match sample:  # embodied runs write evaluation episodes
            case {"prompt": str(prompt), "response": str(response), "reward": int(reward) | float(reward)}:
                view.samples(last, [Sample(prompt, response, reward)])
    console.print(view)
    # rich loads a font from a CDN; without it viewers show their monospaced font in the same places
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
