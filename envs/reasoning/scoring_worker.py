"""The program of a scoring process, which `scoring.py` starts: one verifier or tool, one response at a time.

The process reads a VerifierSpec (or ToolSpec) and then lists of ScoreItem (or ToolCall) from its socket, all pickled.
It writes lines of JSON, which cannot carry code: first whether it is ready (`started`), then one score per item as soon
as it is known (`score.py`). Nothing here imports torch, so a process starts quickly.

Built-in verifiers evaluate text of the model only in copies of the process (`answers/fork.py`), so no sample changes
the score of a later one. Functions of the user run in the process itself.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
import traceback
from dataclasses import asdict

from rl_platform.envs.reasoning.score import RAISED, Score, checked_reward, checked_steps, encode, parts_of, unscored
from rl_platform.envs.reasoning.verifiers import ScoreItem, Verifier, VerifierSpec
from rl_platform.errors import ConfigError, Problem, WorkerError
from rl_platform.standard_streams import never_fail


def main() -> None:
    """Runs the process. Its argument is the socket's descriptor."""
    never_fail()  # a verifier may print
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the pool is closed
        return


def _serve(connection: socket.socket) -> None:
    stream = connection.makefile("rb")
    try:
        spec = pickle.load(stream)
        verifier = spec.load()
    except ConfigError as error:
        connection.sendall(_line({"problems": [asdict(problem) for problem in error.problems]}))
        return
    except BaseException:
        connection.sendall(_line({"error": traceback.format_exc()}))
        return
    if isinstance(spec, VerifierSpec) and spec.evaluates:
        from rl_platform.envs.reasoning.answers.fork import become_template

        become_template()
    connection.sendall(_line({"ready": True}))
    while True:
        for item in pickle.load(stream):
            connection.sendall(encode(score_one(verifier, item)))


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def started(line: bytes) -> None:
    """Checks the first line of a process: it is ready.

    Raises ConfigError or WorkerError if the process could not load its verifier or tool, ValueError for other lines.
    """
    match json.loads(line):
        case {"problems": [*problems]}:
            raise ConfigError([Problem(**problem) for problem in problems])
        case {"error": str(error)}:
            raise WorkerError(f"the verifier or tool cannot be loaded:\n{error}")
        case {"ready": True}:
            return
    raise ValueError(f"the process wrote {line[:100]!r} before it was ready")


def score_one(verifier: Verifier, item: ScoreItem) -> Score:
    """Returns the score of an item; any exception of the verifier, also SystemExit, makes the score invalid."""
    try:
        verdict = verifier(item)
        if isinstance(verdict, Score):  # of a tool
            return verdict
        value, steps = parts_of(verdict)
        return Score(checked_reward(value), steps=checked_steps(steps, item.response))
    except BaseException:
        return unscored(RAISED, traceback.format_exc())
