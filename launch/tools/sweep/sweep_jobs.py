"""Runs the points of a sweep, several at a time, each as a process of its own.

Each point computes with `cores / jobs` threads. It gets an equal part of the GPUs, or one GPU if there are fewer GPUs
than jobs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_platform.launch.tools.run_process import ask_to_stop, end_run, last_lines, start_run
from rl_platform.launch.tools.sweep.grid import SweepPoint
from rl_platform.launch.tools.sweep.summary import steps_of
from rl_platform.launch.views.headline import duration
from rl_platform.placement.inventory import VISIBLE_DEVICES, cpu_count, detect_accelerators
from rl_platform.runtime.child import Child

THREADS = "OMP_NUM_THREADS"
POLL_S = 0.05
WATCH_S = 1.0  # between two looks at the metrics of a running point
SIGN_S = 30.0  # between two lines about the running points
STOPPING_S = 26.0  # for points to save after a signal; the command is cut off 30 s after it
SHOWN = 8  # last lines of a failed point


class PointSource(Protocol):
    """Returns the points to run and receives the end of each. total: the number of its points."""

    total: int

    def next(self) -> SweepPoint | None:
        """Returns a point, None if there is none now."""

    def hopeless(self, point: SweepPoint) -> bool:
        """Returns whether a running point is stopped before its end."""

    def ended(self, point: SweepPoint, reason: str) -> None:
        """Receives the end of a point. reason: `exit code 0`, `killed by SIGKILL`, or `pruned`."""


@dataclass
class _Running:
    point: SweepPoint
    child: Child
    slot: int
    began: float
    watched: float
    log: Path
    log_begin: int  # bytes of earlier attempts
    pruned: bool = False


def shares(jobs: int) -> list[dict[str, str]]:
    """Returns the environment variables of each of `jobs` simultaneous points. A set number of threads stays."""
    common = {"PYTHONUNBUFFERED": "1"}
    if jobs > 1 and THREADS not in os.environ:
        common[THREADS] = str(max(1, cpu_count() // jobs))
    gpus, _ = detect_accelerators()
    if jobs == 1 or not gpus:
        return [common] * jobs
    part = max(1, len(gpus) // jobs)
    starts = (slot * part % (len(gpus) - part + 1) for slot in range(jobs))
    return [common | {VISIBLE_DEVICES: ",".join(gpus[start : start + part])} for start in starts]


class Jobs:
    """Runs points. arguments: the command line of a point's run. environments: one per simultaneous point.

    say: prints a line.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Callable[[SweepPoint], Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self._arguments, self.environments, self._say = folder, arguments, environments, say
        self._running: list[_Running] = []
        self._last_sign = time.monotonic()

    def run(self, source: PointSource) -> dict[str, str]:
        """Runs all points; a failed one does not end the others. Returns the names of failed points with the reason.

        An exception, such as Interrupted, ends the running points: they save and can be resumed.
        """
        failed: dict[str, str] = {}
        count = 0
        try:
            while True:
                while len(self._running) < len(self.environments) and (point := source.next()) is not None:
                    count += 1
                    self._start(point, f"{count} of {source.total}")
                if not self._running:
                    return failed
                for one in list(self._running):
                    if one.child.ends_within(POLL_S / len(self._running)):
                        self._running.remove(one)
                        reason = self._end(one)
                        if reason not in ("exit code 0", "pruned"):
                            failed[one.point.name] = reason
                        source.ended(one.point, reason)
                    else:
                        self._watch(one, source)
                self._give_sign()
        except BaseException as error:
            error.add_note("the same command continues the sweep")
            self._stop()
            raise

    def _start(self, point: SweepPoint, which: str) -> None:
        taken = {one.slot for one in self._running}
        slot = next(number for number in range(len(self.environments)) if number not in taken)
        log = self.folder / f"{point.name}.log"
        begin = log.stat().st_size if log.exists() else 0
        child = start_run(self._arguments(point), self.environments[slot], log)
        now = time.monotonic()
        self._running.append(_Running(point, child, slot, now, now, log, begin))
        self._say(f"{point.name}: started, {which}")

    def _watch(self, one: _Running, source: PointSource) -> None:
        now = time.monotonic()
        if one.pruned or now - one.watched < WATCH_S:
            return
        one.watched = now
        if source.hopeless(one.point):
            one.pruned = True
            ask_to_stop(one.child)

    def _end(self, one: _Running) -> str:
        name, seconds = one.point.name, time.monotonic() - one.began
        reason = "pruned" if one.pruned else one.child.exit_reason()
        end_run(one.child)
        if reason == "exit code 0":
            self._say(f"{name}: finished in {duration(seconds)}")
        elif reason == "pruned":
            self._say(f"{name}: pruned after {_progress(self.folder / name)}")
        else:
            lines = "".join(f"\n    {line}" for line in last_lines(one.log, SHOWN, one.log_begin))
            self._say(f"{name}: failed with {reason} after {duration(seconds)}; the end of {one.log}:{lines}")
        return reason

    def _give_sign(self) -> None:
        if time.monotonic() - self._last_sign >= SIGN_S:
            self._last_sign = time.monotonic()
            for one in self._running:
                self._say(f"{one.point.name}: {_progress(self.folder / one.point.name)}")

    def _stop(self) -> None:
        """Ends the running points; each saves if its step ends within `runner.stop_grace_s`."""
        if self._running:
            self._say(f"stopping {', '.join(one.point.name for one in self._running)}; they save at the end of a step")
        for one in self._running:
            ask_to_stop(one.child)
        until = time.monotonic() + STOPPING_S
        for one in self._running:
            one.child.ends_within(max(until - time.monotonic(), 0.0))
            end_run(one.child)


def _progress(run: Path) -> str:
    rows = steps_of(run)
    return f"step {rows[-1]['step']:.0f}" if rows else "no step yet"
