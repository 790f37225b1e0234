"""The report of a run in which nothing moves."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from stand_ins import Placed
from waiting import until

from rl_platform.runners import hang_watch as module
from rl_platform.runners.hang_watch import hang_watch
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.host import ComponentContext
from rl_platform.runtime.local import LocalRuntime


class Waiter:
    def __init__(self, context: ComponentContext) -> None:
        self.context = context

    def stand_still(self, event: threading.Event) -> None:
        event.wait(20)

    def crawl(self, seconds: float) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            self.context.progress.update(self.context.progress.done + 1, 0, "steps")
            time.sleep(0.02)


def test_stacks_of_both_sides_are_written_once(tmp_path: Path) -> None:
    notes: list[str] = []
    event = threading.Event()
    with LocalRuntime(Placed.of([("rollout", 0)], [("rollout", 1)]), 30.0, 1) as runtime:
        groups = runtime.start({"rollout": ComponentSpec(Waiter)})
        with hang_watch(groups, tmp_path, notes.append, deadline_s=0.4):
            for _ in range(2):
                handle = groups["rollout"].rank(1).stand_still(event)
                until(lambda: bool(notes))
                time.sleep(0.3)
                event.set()
                handle.wait()
                event.clear()
    (note,) = notes
    assert note.startswith("nothing has moved for 0 s: the runner waits, rollout[1] busy in stand_still for ")
    assert note.endswith(f"Their stacks are in {tmp_path / 'stacks.txt'}")
    text = (tmp_path / "stacks.txt").read_text()
    runner, rank = text.split("--- rollout[1]")
    assert "--- runner" in runner
    assert "test_stacks_of_both_sides_are_written_once" in runner
    assert "event.wait(20)" in rank
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


def test_progress_is_no_hang(tmp_path: Path) -> None:
    notes: list[str] = []
    with LocalRuntime(Placed.of([("env", 0)]), 30.0, 1) as runtime:
        groups = runtime.start({"env": ComponentSpec(Waiter)})
        with hang_watch(groups, tmp_path, notes.append, deadline_s=1.0):
            groups["env"].crawl(1.2).wait()
    assert notes == []


def test_a_full_disk_does_not_hide_the_report(tmp_path: Path) -> None:
    assert module.PATIENCE_S + module.LOOK_S < 60
    message = module._report({}, [], tmp_path / "missing" / "stacks.txt", 45.0, threading.get_ident())
    assert message.startswith("nothing has moved for 45 s: the runner waits, no rank is busy. Their stacks cannot be")
