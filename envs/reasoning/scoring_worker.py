"""The process that scores: started by `scoring.py`, one verifier, one response at a time.

A tool that answers turns of a conversation works in the same way, see `tools.py`.

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
from numbers import Integral, Real
from typing import Any

from rl_platform.envs.reasoning.verifiers import ScoreItem, Verifier
from rl_platform.errors import ConfigError, WorkerError

READY = "ready"
RAISED, TIMEOUT, DIED = "raised", "timeout", "died"
_PR_SET_PDEATHSIG = 1
_LONGEST_DETAIL = 4_000


@dataclass(frozen=True)
class Score:
    """`value` counts only if `valid`; otherwise `reason` is RAISED, TIMEOUT or DIED, and `detail` tells more.

    `steps`: where a step of the response ends, in characters from its beginning, and the reward of that step.
    `text`: what a tool answers.
    """

    value: float
    valid: bool = True
    reason: str = ""
    detail: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    text: str | None = None


def main() -> None:
    """Entry point of the process: arguments are the socket's descriptor and the process id of the parent."""
    descriptor, parent = map(int, sys.argv[1:])
    _die_with(parent)
    connection = Connection(descriptor)
    try:
        verifier = connection.recv().load()
    except ConfigError as error:
        connection.send(error)
        return
    except BaseException:
        connection.send(WorkerError(f"the verifier or tool cannot be loaded:\n{traceback.format_exc()}"))
        return
    connection.send(READY)
    try:
        while True:
            for item in connection.recv():
                connection.send(score_one(verifier, item))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the pool is closed
        return


def score_one(verifier: Verifier, item: ScoreItem) -> Score:
    """The verifier's verdict. Whatever it raises, SystemExit too, makes the sample invalid; the process goes on."""
    try:
        verdict = verifier(item)
        if isinstance(verdict, Score):
            return verdict
        value, steps = verdict if isinstance(verdict, tuple) else (verdict, ())
        return Score(_number(value), steps=tuple((_end(end, item.response), _number(reward)) for end, reward in steps))
    except BaseException:
        return Score(0.0, valid=False, reason=RAISED, detail=traceback.format_exc()[-_LONGEST_DETAIL:])


def _number(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward must be a finite number, not {value!r}")
    return float(value)


def _end(end: Any, response: str) -> int:
    if not isinstance(end, Integral) or not 0 < end <= len(response):
        raise ValueError(f"a step of a response of {len(response)} characters cannot end at {end!r}")
    return int(end)


def _die_with(parent: int) -> None:
    """Linux: the kernel kills this process with the thread that started it, even if a verifier hangs. Elsewhere an idle
    process ends when its socket closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
