"""The process that scores: started by `scoring.py`, one verifier, one response at a time.

Spoken over one socket: in comes a VerifierSpec, then lists of ScoreItem; out goes READY (or the error that prevented
it), then one Score per item as soon as it is known. Nothing here needs torch, so a process starts quickly.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from rl_platform.envs.reasoning.verifiers import ScoreItem, Verifier, load_verifier
from rl_platform.errors import ConfigError, WorkerError

READY = "ready"
RAISED, TIMEOUT, DIED = "raised", "timeout", "died"
_PR_SET_PDEATHSIG = 1
_LONGEST_DETAIL = 4_000


@dataclass(frozen=True)
class Score:
    """`value` counts only if `valid`; otherwise `reason` is RAISED, TIMEOUT or DIED, and `detail` tells more."""

    value: float
    valid: bool = True
    reason: str = ""
    detail: str = ""


def main() -> None:
    """Entry point of the process: arguments are the socket's descriptor and the process id of the parent."""
    descriptor, parent = map(int, sys.argv[1:])
    _die_with(parent)
    connection = Connection(descriptor)
    try:
        verifier = load_verifier(connection.recv())
    except ConfigError as error:
        connection.send(error)
        return
    except BaseException:
        connection.send(WorkerError(f"the verifier cannot be loaded:\n{traceback.format_exc()}"))
        return
    connection.send(READY)
    try:
        while True:
            for item in connection.recv():
                connection.send(score_one(verifier, item))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the pool is closed
        return


def score_one(verifier: Verifier, item: ScoreItem) -> Score:
    """The verifier's number. Whatever it raises, SystemExit included, makes the sample invalid; the process goes on."""
    try:
        value = _number(verifier(item))
    except BaseException:
        return Score(0.0, valid=False, reason=RAISED, detail=traceback.format_exc()[-_LONGEST_DETAIL:])
    return Score(value)


def _number(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, not {value!r}")
    return float(value)


def _die_with(parent: int) -> None:
    """Linux: the kernel kills this process with the thread that started it, even if a verifier hangs. Elsewhere an idle
    process ends when its socket closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
