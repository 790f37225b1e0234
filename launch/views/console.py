"""The console on which a run, a check and an evaluation print, in a program of the user too."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def run_console(*, show: bool = True) -> Console:
    """Returns a console of standard output; with `show=False` of nothing.

    In a notebook it prints lines of text, as into a pipe. By default rich sends HTML to the page there instead, also
    from a console that has a file, and requires ipywidgets. `FORCE_COLOR`, which Jupyter sets, makes no terminal.
    """
    file = None if show else io.StringIO()
    return Console(file=file, force_jupyter=False, force_terminal=None if (file or sys.stdout).isatty() else False)
