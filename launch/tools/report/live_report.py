"""`rl-platform report`: checks the command line, writes the report, and rewrites it while runs go on."""

from __future__ import annotations

import time
import webbrowser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rl_platform.errors import ConfigError, Problem, check_all
from rl_platform.launch.tools.named_runs import check_runs
from rl_platform.launch.tools.report.collect import collect, state_of
from rl_platform.launch.tools.report.page import ENDINGS, write
from rl_platform.launch.written import check_output

MOST_RUNS = 8  # colours that a reader can distinguish
FOLLOW_S = 10


def report(runs: Sequence[Path], output: Path, show: bool, follow: bool) -> Iterator[str]:
    """Writes the report of the runs to `output` and yields lines for the terminal.

    follow: the file is written again every `FOLLOW_S` seconds until all runs have ended. show: in the browser. Raises
    ConfigError for a wrong command line, DataError for a damaged run.
    """
    check_all(partial(_check_number, runs), partial(check_runs, runs), partial(check_output, output, ENDINGS))
    shown = False
    while True:
        collected = collect(runs, output)
        goes_on = follow and any(run.state == "running" for run in collected)
        write(collected, output, FOLLOW_S if goes_on else 0)
        if not shown:
            shown = True
            yield str(output)
            if show and not webbrowser.open(output.absolute().as_uri()):
                yield "no browser was found: open the file yourself"
            if goes_on:
                yield f"written again every {FOLLOW_S} s until the run ends; Ctrl-C stops that"
            elif follow:
                yield "no run goes on, so the report is final"
        if not goes_on:
            return
        _wait(runs)


def _check_number(runs: Sequence[Path]) -> None:
    """Raises ConfigError for too many runs."""
    if len(runs) > MOST_RUNS:
        allowed = f"at most {MOST_RUNS}"
        raise ConfigError([Problem("RUN", "too many runs for one page", value=str(len(runs)), allowed=allowed)])


def _wait(runs: Sequence[Path]) -> None:
    """Waits until the report is due: after `FOLLOW_S`, or at once when a run has ended."""
    before = [state_of(path if path.is_dir() else path.parent) for path in runs]
    for _ in range(FOLLOW_S):
        time.sleep(1)
        if [state_of(path if path.is_dir() else path.parent) for path in runs] != before:
            return
