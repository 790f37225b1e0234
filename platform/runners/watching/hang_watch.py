"""Reports a run in which nothing moves: which ranks are busy, and where their code and the runner's are.

A call that never ends fails at its deadline (`runner.deadline_s`); the report comes long before. A step that really
takes that long without any progress is reported too, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rl_platform.runtime.lifecycle import RUNNER
from rl_platform.runtime.waits import stack_of
from rl_platform.runtime.worker_group import Worker, WorkerGroup

PATIENCE_S = 45.0
LOOK_S = 1.0
STACKS = "stacks.txt"
MOST_SHOWN = 8


@contextmanager
def hang_watch(
    groups: Mapping[str, WorkerGroup], folder: Path, note: Callable[[str], None], deadline_s: float
) -> Iterator[None]:
    """Reports within the block if no call of any rank ends or progresses for 45 s, or half of `deadline_s` if less.

    The note names the busy ranks. `stacks.txt` in `folder` has the stacks of the runner and of these ranks, or of all
    ranks if none is busy.
    """
    workers = [worker for group in groups.values() for worker in group.workers]
    over, patience, main = threading.Event(), min(PATIENCE_S, deadline_s / 2), threading.get_ident()

    def look() -> None:
        moved, since, reported = None, time.monotonic(), set[frozenset[str]]()
        while not over.wait(min(LOOK_S, patience / 4)):
            now = [(worker.timings(), worker.progress().done) for worker in workers]
            if now != moved:
                moved, since = now, time.monotonic()
                continue
            busy = {worker: doing for worker in workers if (doing := worker.doing()) != "idle"}
            names = frozenset(worker.label for worker in busy)
            if time.monotonic() - since >= patience and names not in reported:
                reported.add(names)
                asked = list(busy) or workers[:MOST_SHOWN]  # a process that stands still has not taken its call
                note(_report(busy, asked, folder / STACKS, time.monotonic() - since, main))

    thread = threading.Thread(target=look, name="hang watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _report(busy: Mapping[Worker, str], asked: Sequence[Worker], path: Path, seconds: float, main: int) -> str:
    """Writes the stacks of the runner and of the ranks `asked`; returns the message."""
    shown = [f"{worker.label} {doing}" for worker, doing in busy.items()]
    more = [f"{len(shown) - MOST_SHOWN} more ranks are busy"] if len(shown) > MOST_SHOWN else []
    states = ", ".join(shown[:MOST_SHOWN] + more) or "no rank is busy"
    headline = f"nothing has moved for {seconds:.0f} s: the runner waits, {states}"
    with ThreadPoolExecutor(MOST_SHOWN) as pool:  # a process that does not answer takes seconds
        stacks = [stack_of(main), *pool.map(lambda worker: worker.stack(), asked)]
    names = [RUNNER, *(worker.label for worker in asked)]
    text = "\n".join(f"--- {name}\n{stack.rstrip()}" for name, stack in zip(names, stacks, strict=True))
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {headline}\n{text}\n\n")
    except OSError as error:
        return f"{headline}. Their stacks cannot be written to {path}: {error.strerror}"
    return f"{headline}. Their stacks are in {path}"
