"""The policy as the environments see it: rollout ranks behind channels, each of which chooses the actions of an equal
run of the observations it is asked about, or the one rank in the same process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from rl_platform.components.policy_rollout import Actions, Observations, PolicyRollout
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.cpu import compute_alone

BESIDE = ("hidden_states", "tasks")  # of observations, row by row
FIELDS = tuple(field.name for field in fields(Actions))


@dataclass(frozen=True)
class PolicyRanks:
    """The channels to and from `ranks` rollout ranks; with several, a message's key is the rank."""

    to_policy: Channel[Observations]
    from_policy: Channel[Actions]
    ranks: int = 1

    def ask(self, observations: Observations) -> None:
        """Put a question; several may be open."""
        if self.ranks == 1:
            self.to_policy.put(observations)
            return
        count = len(observations.array)
        for rank, rows in self._parts(count):
            kept = {name: None if (whole := getattr(observations, name)) is None else whole[rows] for name in BESIDE}
            part = replace(observations, array=observations.array[rows], among=(rows.start, count), **kept)
            self.to_policy.put(part, key=rank)

    def answer(self, count: int) -> Actions:
        """Actions for the `count` observations of the oldest open question."""
        if self.ranks == 1:
            return self.from_policy.get()
        parts = [self.from_policy.get(key=rank) for rank, _ in self._parts(count)]
        names = [name for name in FIELDS if getattr(parts[0], name) is not None]
        return Actions(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def _parts(self, count: int) -> Iterator[tuple[int, slice]]:
        """Ranks and their rows; a rank without rows is left alone."""
        for rank in range(self.ranks):
            first, last = count * rank // self.ranks, count * (rank + 1) // self.ranks
            if last > first:
                yield rank, slice(first, last)


class PolicyHere:
    """The only rollout rank, in this very process: it acts in the thread that asks, and nobody hands over anything."""

    def __init__(self, rollout: PolicyRollout) -> None:
        """Raises WorkerError if it has no complete weights."""
        rollout.check_complete()
        if rollout.device.type == "cpu" and torch.get_num_threads() > 1:
            compute_alone()  # as the rollout's own thread does
        self._rollout = rollout
        self._answers: deque[Actions] = deque()

    def ask(self, observations: Observations) -> None:
        """Answer a question; several answers may be kept."""
        self._answers.append(self._rollout.act(observations))

    def answer(self, count: int) -> Actions:
        """Actions for the `count` observations of the oldest question."""
        return self._answers.popleft()


Policy = PolicyRanks | PolicyHere
