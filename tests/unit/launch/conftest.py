"""How much work a command was: on a busy machine the time it took says little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Program(NamedTuple):
    """A Python program that has ended. cpu_seconds: its own and those of the processes that it waited for."""

    code: int
    out: str
    err: str
    cpu_seconds: float


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Program]:
    """program("print(1)"): runs Python code in the working folder.

    The kernel's sum over all children of this process would count those of earlier tests too, which end or are waited
    for whenever it likes, as in the next `subprocess.Popen`.
    """

    def run(code: str) -> Program:
        out, err = (tmp_path.parent / f"{tmp_path.name}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=stderr)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return Program(process.returncode, out.read_text(), err.read_text(), usage.ru_utime + usage.ru_stime)

    return run
