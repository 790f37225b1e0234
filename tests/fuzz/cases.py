"""One fuzzed case: a seed makes an input, the platform reads it, and the command must end with exit code 0, 2 or 65.

`python tests/fuzz/cases.py models 17` replays case 17 of the kind `models` and prints its input; `... models 0 2000`
runs two thousand of them. A case fails if it ends with another code or a traceback, if it takes more than `MOST_S`
seconds of processor time, or if it takes more than `MOST_MEMORY` bytes.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Protocol

from rl_platform.launch.cli import _explain

CODES = (0, 2, 65)
MOST_S = 3.0  # processor time of a case
GIVEN_UP_S = 20.0  # a case that takes longer is interrupted
MOST_MEMORY = 2**30


class Kind(Protocol):
    """A kind of input. The constructor makes the materials of all cases in a folder."""

    def case(self, numbers: random.Random) -> tuple[str, Callable[[], object]]:
        """The input as a text, and the call that reads it."""


@dataclass(frozen=True)
class Ended:
    """How a case ended."""

    kind: str
    seed: int
    code: int
    seconds: float
    memory: int
    shown: str
    said: str

    @property
    def fault(self) -> str:
        """What is wrong with the case, "" if nothing is."""
        if self.code not in CODES:
            return f"exit code {self.code}"
        if "Traceback" in self.said:
            return "a traceback"
        if self.seconds > MOST_S:
            return f"{self.seconds:.1f} s of processor time"
        return f"{self.memory / 2**20:.0f} MiB" if self.memory > MOST_MEMORY else ""

    def __str__(self) -> str:
        command = f"python tests/fuzz/cases.py {self.kind} {self.seed}"
        return f"{command}: {self.fault or self.code}\n--- input\n{self.shown}\n--- output\n{self.said}"


class TooLong(Exception):
    """A case used `GIVEN_UP_S` seconds of processor time."""


def run(name: str, kind: Kind, seed: int) -> Ended:
    """Runs case `seed` of a kind in this process, as the command line would."""
    shown, call = kind.case(random.Random(f"{name} {seed}"))
    said = io.StringIO()
    code, most, began = 0, _memory(), process_time()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), _interrupted():
        try:
            call()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            code = _explain(error, "platform-launch")
    return Ended(name, seed, code, process_time() - began, _memory() - most, shown, said.getvalue())


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make(name: str, folder: Path) -> Kind:
    """The kind called `name`, with its materials in `folder`."""
    from fuzz import checkpoints, configs, models, placements, questions

    kinds: dict[str, Callable[[Path], Kind]] = {
        "configs": configs.Configs,
        "placements": placements.Placements,
        "questions": questions.Questions,
        "models": models.Models,
        "checkpoints": checkpoints.Checkpoints,
    }
    return kinds[name](folder)


def main(name: str, first: int, last: int | None) -> int:
    """Runs the cases from `first` to `last`, or shows the one. Returns the number that failed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.chdir(folder)
        kind = make(name, Path(folder))
        if close := getattr(kind, "close", None):
            stack.callback(close)
        if last is None:
            ended = run(name, kind, first)
            print(ended)
            return bool(ended.fault)
        codes: Counter[int] = Counter()
        seconds, slowest, faults = 0.0, 0.0, 0
        for seed in range(first, last):
            ended = run(name, kind, seed)
            codes[ended.code] += 1
            seconds, slowest = seconds + ended.seconds, max(slowest, ended.seconds)
            if ended.fault:
                faults += 1
                print(ended, flush=True)
        print(f"{name}: {last - first} cases, {faults} failed, codes {dict(sorted(codes.items()))}")
        print(f"{1000 * seconds / max(1, last - first):.1f} ms of processor time on average, at most {slowest:.2f} s")
        return faults


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(min(1, main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)))
