"""Replaces environments that raise."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rl_platform.user_code import raised_at

if TYPE_CHECKING:
    from rl_platform.envs.embodied.descriptions import EnvSetup
    from rl_platform.envs.embodied.spaces import AnyEnv

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """An exception of an environment. place: `file:line`; step: of the episode, from 1; 0: its reset."""

    kind: str
    place: str
    step: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.place} in {f'step {self.step} of an episode' if self.step else 'reset'}"


class Spares:
    """Builds replacements for environments first, first + 1, ... and counts them in `failures` [N] of all workers.

    An error of the code is raised instead, because replacements would repeat it. It is the same exception from the same
    line in the same step of the episode as the failure before it, with no progress in between: no episode of the
    environment has ended or got further, or no environment at all has been stepped since, or ever got further.

    lengths [K]: the steps of the running episodes, before the step in which an environment raises.
    seeds: those of these environments. progress: must be set whenever a step succeeds.
    """

    def __init__(self, setup: EnvSetup, failures: np.ndarray, first: int, lengths: np.ndarray) -> None:
        self._setup, self._failures, self._first, self._lengths = setup, failures, first, lengths
        self._new: set[int] = set()
        self.seeds: list[int] = []
        self.progress = False  # since the newest failure
        self._newest: tuple[int, Failure] | None = None
        self._latest: dict[int, Failure] = {}  # of environments of which no episode has ended since
        self._longest = np.zeros_like(lengths)  # of the episodes that ended

    def ended(self, which: np.ndarray) -> None:
        """Must be called for valid episodes that ended, before they are reset."""
        self._longest[which] = np.maximum(self._longest[which], self._lengths[which])
        for i in which.tolist():
            self._latest.pop(i, None)

    def replacement(self, i: int, broken: AnyEnv, doing: str, error: Exception) -> AnyEnv:
        """Returns a replacement for environment first + i, which raised `error` in `reset` or `step`.

        Raises `error`, with a note, if no restarts are left or if the replacement would raise it too.
        """
        step = 0 if doing == "reset" else int(self._lengths[i]) + 1
        failed = Failure(type(error).__name__, raised_at(error), step)
        allowed, used = self._setup.restarts, int(self._failures.sum())
        if allowed and (earlier := self._earlier(i, failed)):
            error.add_note(f"{failed}, twice in a row{earlier}: no further restart (env.restarts), correct the code")
            raise error
        if used >= allowed:
            if allowed:
                error.add_note(f"{failed}: no restart is left, {used} environments were replaced (env.restarts)")
            raise error
        name = f"environment {self._first + i} ({self._setup.description.id})"
        text = "%s is replaced, %d restarts are left; it raised %s: %s"
        logger.warning(text, name, allowed - used - 1, failed, error, exc_info=error)
        self._latest[i], self._newest, self.progress = failed, (i, failed), False
        self._failures[self._first + i] += 1
        with contextlib.suppress(Exception):  # it may be broken
            broken.close()
        self._new.add(i)
        return self._setup.make(self._first + i)

    def _earlier(self, i: int, failed: Failure) -> str:
        """Returns which failure this one repeats without progress in between; empty: it may be one of chance."""
        if self._latest.get(i) == failed and (failed.step <= 1 or self._longest[i] < failed.step):
            return " in this environment"
        if self._newest is None or self.progress or failed.step == 0:
            return ""
        other, newest = self._newest
        furthest = max(self._longest.max(), self._lengths.max())
        if other != i and newest == failed and furthest < failed.step:
            return f", before in environment {self._first + other}, and none has got further"
        return ""

    def seed_of_new(self, i: int) -> int | None:
        """Returns the seed of a new replacement, once; None for an environment that keeps its random state."""
        if i not in self._new:
            return None
        self._new.remove(i)
        entropy = [self.seeds[i], int(self._failures[self._first + i])]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])
