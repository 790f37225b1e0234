"""Runs code that evaluates text of a model in a forked copy of this process, which ends with the sample.

The copy cannot change this process: besides the standard streams it has only the pipe of its result, which is one line
of JSON. It is no sandbox: the copy has the rights of the user.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import psutil

from rl_platform.envs.reasoning.score import json_number

LONGEST_RESULT = 2**16  # bytes, of a traceback
MEMORY = 4 * 2**30  # bytes that a copy may add: a power of powers must not use up the memory of the machine
_PDEATHSIG, _DUMPABLE, _SUBREAPER = 1, 4, 36  # of prctl(2)
_prctl: Callable[..., int] = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0

_template = False


def in_fork(function: Callable[[], float]) -> float:
    """Returns the number in [0, 1] that `function` returns in a copy of this process.

    Raises ValueError if it raises, with the traceback, if the copy dies, and for any other result.
    """
    ours, theirs = os.pipe()
    copy = os.fork()
    if not copy:
        _run(function, theirs)
    os.close(theirs)
    try:
        line = _line(ours)
    finally:
        os.close(ours)
        os.kill(copy, signal.SIGKILL)
        _, status = os.waitpid(copy, 0)
        if _template:
            _end_leftovers()
    try:
        result: object = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"the process of this sample ended without a result (status {status})") from None
    match result:
        case {"value": value} if 0 <= json_number(value) <= 1:
            return float(value)
        case {"error": str(error)}:
            raise ValueError(f"in the process of this sample:\n{error}")
    raise ValueError(f"the process of this sample wrote {line[:100]!r}")


def _run(function: Callable[[], float], pipe: int) -> NoReturn:
    try:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 2**16)
        limit = MEMORY + getattr(psutil.Process().memory_info(), "data", 0)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        result: dict[str, object] = {"value": float(function())}
    except BaseException:
        result = {"error": traceback.format_exc()[-LONGEST_RESULT // 8 :]}
    with suppress(BaseException):
        os.write(pipe, json.dumps(result).encode() + b"\n")
    os._exit(0)


def _line(pipe: int) -> bytes:
    """Returns the first line; a child of the copy may hold the pipe open."""
    line = b""
    while len(line) < LONGEST_RESULT and b"\n" not in line and (arrived := os.read(pipe, LONGEST_RESULT)):
        line += arrived
    return line.partition(b"\n")[0]


def become_template() -> None:
    """Prepares a process that starts children only by `in_fork`: what a sample leaves running is killed.

    Orphans become children of this process. On Linux they cannot read or write its memory, unless they have the
    capability CAP_SYS_PTRACE.
    """
    global _template
    _template = True
    _prctl(_SUBREAPER, 1)
    _prctl(_DUMPABLE, 0)
    gc.collect()
    gc.freeze()  # a collection in a copy would write to the pages of all objects


def _end_leftovers() -> None:
    with suppress(ChildProcessError):  # there is none, the usual case
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for process in psutil.Process().children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                os.waitpid(-1, 0)
