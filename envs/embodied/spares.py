"""Replaces environments that raise."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rl_platform.envs.embodied.descriptions import ENV_ERRORS
from rl_platform.errors import message_of
from rl_platform.user_code import raised_at

if TYPE_CHECKING:
    from rl_platform.envs.embodied.descriptions import EnvSetup
    from rl_platform.envs.embodied.spaces import AnyEnv

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """The exception of an environment. place: `file:line`, empty if nothing was raised.

    step: of the episode, from 1; 0: its reset.
    """

    kind: str
    place: str
    step: int

    def __str__(self) -> str:
        place = f" at {self.place}" if self.place else ""
        return f"{self.kind}{place} in {f'step {self.step} of an episode' if self.step else 'reset'}"


class Spares:
    """Builds replacements for environments first, first + 1, ... and counts them in `failures` [N] of all workers.

    A failure that a replacement would only repeat ends the run instead. Such a failure raises the same exception, from
    the same line and in the same step of the episode, as the environment's previous failure. In between, no episode of
    the environment ended, and none was longer before.

    lengths [K]: the steps of the running episodes, before the step in which an environment raises.
    seeds: those of these environments. replaced [K]: how often each failed, also before a resume.
    """

    def __init__(self, setup: EnvSetup, failures: np.ndarray, first: int, lengths: np.ndarray) -> None:
        self._setup, self._failures, self._first, self._lengths = setup, failures, first, lengths
        self._new: set[int] = set()
        self.seeds: list[int] = []
        self.replaced = np.zeros_like(lengths)
        self._latest: dict[int, Failure] = {}  # of environments of which no episode has ended since
        self._longest = np.zeros_like(lengths)  # of the episodes that ended
        self._warned: Failure | None = None  # the last one

    def ended(self, which: np.ndarray) -> None:
        """Records the lengths of valid episodes that ended. The caller calls it before it resets them."""
        self._longest[which] = np.maximum(self._longest[which], self._lengths[which])
        for i in which.tolist():
            self._latest.pop(i, None)

    def begun(self, which: np.ndarray) -> None:
        """Deletes the failures in `reset` of environments that have begun an episode."""
        if self._latest:
            for i in which.tolist():
                if i in self._latest and self._latest[i].step == 0:
                    del self._latest[i]

    def replacement(self, i: int, broken: AnyEnv) -> AnyEnv:
        """Returns a replacement for environment first + i."""
        with contextlib.suppress(*ENV_ERRORS):  # it may be broken
            broken.close()
        return self._setup.make(self._first + i)

    def count(self, i: int, doing: str, error: BaseException) -> str:
        """Counts a failure of environment first + i in `reset` or `step` and warns of it.

        Returns why it ends the run; empty: the environment begins again, with the seed of `seed_of_new`.
        """
        step = 0 if doing == "reset" else int(self._lengths[i]) + 1
        failed = Failure(type(error).__name__, raised_at(error, installed=True), step)
        name, allowed, used = self.named(i), self._setup.restarts, int(self._failures.sum())
        if allowed and self._repeats(i, failed):
            return f"{name}: {failed}, twice in a row: no further restart (env.restarts), correct the code"
        if used >= allowed:
            return f"{name}: {failed}: no restart is left of {allowed} (env.restarts)"
        again = f"{name} is started again, restarts left: {allowed - used - 1}"
        if failed == self._warned:
            logger.warning("%s: as above", again)
        else:
            logger.warning(
                "%s: %s: %s", again, failed, message_of(error), exc_info=error if error.__traceback__ else None
            )
        self._latest[i] = self._warned = failed
        self._failures[self._first + i] += 1
        self.replaced[i] += 1
        self._new.add(i)
        return ""

    def named(self, i: int) -> str:
        """Returns environment first + i, with its id and task, for messages."""
        description, number = self._setup.description, self._first + i
        names = description.task_names
        task = f", task {names[self._setup.numbers[number] % len(names)]}" if names else ""
        return f"environment {number} ({description.id}{task})"

    def _repeats(self, i: int, failed: Failure) -> bool:
        """Returns whether this failure is that of the same environment before it, without progress in between."""
        return self._latest.get(i) == failed and (failed.step <= 1 or self._longest[i] < failed.step)

    def is_new(self, i: int) -> bool:
        """Returns whether environment first + i is a replacement that has not begun an episode."""
        return i in self._new

    def seed_of_new(self, i: int) -> int | None:
        """Returns the seed of a new replacement, once; None for an environment that keeps its random state."""
        if i not in self._new:
            return None
        self._new.remove(i)
        entropy = [self.seeds[i], int(self.replaced[i])]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])
