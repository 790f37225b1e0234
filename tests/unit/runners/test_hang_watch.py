"""The report of a run in which nothing moves."""

from __future__ import annotations

import re
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins import Placed
from waiting import HANG_S, until

from rl_platform.runners.watching import hang_watch as module
from rl_platform.runners.watching.hang_watch import hang_watch
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.host import ComponentContext
from rl_platform.runtime.local import LocalRuntime


class Waiter:
    def __init__(self, context: ComponentContext) -> None:
        self.context = context

    def stand_still(self, event: threading.Event) -> None:
        event.wait(HANG_S)

    def crawl(self, enough: threading.Event) -> None:
        while not enough.wait(0.002):
            self.context.progress.update(self.context.progress.done + 1, 0, "steps")


def test_stacks_of_both_sides_are_written_once(tmp_path: Path) -> None:
    notes: list[str] = []
    event = threading.Event()
    with LocalRuntime(Placed.of([("rollout", 0)], [("rollout", 1)]), 30.0, 1) as runtime:
        groups = runtime.start({"rollout": ComponentSpec(Waiter)})
        with hang_watch(groups, tmp_path, notes.append, deadline_s=0.4):
            for _ in range(2):
                handle = groups["rollout"].rank(1).stand_still(event)
                until(lambda: any("rollout[1] busy" in note for note in notes))
                time.sleep(0.3)
                event.set()
                handle.wait()
                event.clear()
    reports = (tmp_path / "stacks.txt").read_text().split("\n\n")  # of other moments too, on a busy machine
    (note,), (text,) = ([text for text in texts if "rollout[1] busy" in text] for texts in (notes, reports))
    assert re.match(r"nothing has moved for \d+ s: the runner waits, rollout\[1\] busy in stand_still for ", note)
    assert note.endswith(f"Their stacks are in {tmp_path / 'stacks.txt'}")
    runner, rank = text.split("--- rollout[1]")
    assert "--- runner" in runner
    assert "test_stacks_of_both_sides_are_written_once" in runner
    assert "event.wait(HANG_S)" in rank
    assert "rollout[0]" not in text


def test_without_a_busy_rank_every_rank_is_asked(tmp_path: Path) -> None:
    """As a process that was stopped before it took its call."""
    notes: list[str] = []
    with LocalRuntime(Placed.of([("rollout", 0)], [("rollout", 1)]), 30.0, 1) as runtime:
        groups = runtime.start({"rollout": ComponentSpec(Waiter)})
        with hang_watch(groups, tmp_path, notes.append, deadline_s=0.4):
            until(lambda: bool(notes))
    assert "no rank is busy" in notes[0]
    text = (tmp_path / "stacks.txt").read_text()
    assert "--- rollout[0]" in text
    assert "--- rollout[1]" in text


def test_progress_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the watch reads the clock, its patience is over and the rank has progressed."""
    notes: list[str] = []
    enough, seconds = threading.Event(), count(step=0.25)
    with LocalRuntime(Placed.of([("env", 0)]), 30.0, 1) as runtime:
        groups = runtime.start({"env": ComponentSpec(Waiter)})
        (worker,) = groups["env"].workers

        def clock() -> float:
            done, now = worker.progress().done, next(seconds)
            until(lambda: enough.is_set() or worker.progress().done > done)
            if now > 3:
                enough.set()
            return 0.0 if enough.is_set() else now

        handle = groups["env"].crawl(enough)
        until(lambda: worker.progress().done)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, strftime=time.strftime))
        with hang_watch(groups, tmp_path, notes.append, deadline_s=0.4):
            handle.wait()
    assert notes == []


def test_a_full_disk_does_not_hide_the_report(tmp_path: Path) -> None:
    assert module.PATIENCE_S + module.LOOK_S < 60
    message = module._report({}, [], tmp_path / "missing" / "stacks.txt", 45.0, threading.get_ident())
    assert message.startswith("nothing has moved for 45 s: the runner waits, no rank is busy. Their stacks cannot be")
