"""The environments of all env ranks as one: rank 0 collects, every rank simulates an equal part of each stage.

What is collected does not depend on the number of ranks: environments are seeded by their number in the whole, and
observations are counted and normalised by rank 0 alone, a whole stage at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rl_platform.envs.embodied.vector import StepResult, VectorEnv
from rl_platform.errors import ChannelClosed
from rl_platform.runtime.channel import Channel


@dataclass(frozen=True)
class Order:
    """What another rank does next: step a stage with these actions (see `VectorEnv.send`), or, without actions, tell
    the observations of all its environments."""

    stage: int = 0
    actions: np.ndarray | None = None
    idle: np.ndarray | None = None


@dataclass(frozen=True)
class Peers:
    """The channels between env rank 0 and the others; a message's key is the rank."""

    orders: Channel[Order]
    answers: Channel[StepResult | np.ndarray]


class Shares:
    """Who simulates which of `num_envs` environments: of each of the `stages`, every rank an equal run, in order."""

    def __init__(self, num_envs: int, stages: int, ranks: int) -> None:
        if num_envs % (stages * ranks):
            raise ValueError(f"{num_envs} environments in {stages} stages cannot be shared equally by {ranks} ranks")
        self.num_envs, self.stages, self.ranks = num_envs, stages, ranks
        self.size = num_envs // (stages * ranks)  # of a rank's part of a stage

    @property
    def rows(self) -> list[slice]:
        """The environments of each stage."""
        return [slice(*bounds) for bounds in pairwise(range(0, self.num_envs + 1, self.size * self.ranks))]

    def part(self, rank: int) -> slice:
        """A rank's rows among those of a stage."""
        return slice(rank * self.size, (rank + 1) * self.size)

    def of(self, rank: int) -> np.ndarray:
        """The environments of a rank, in the order in which it numbers them."""
        return np.concatenate([np.arange(self.num_envs)[rows][self.part(rank)] for rows in self.rows])


class AllEnvs:
    """What rank 0 sees: `send` and `receive` of a `VectorEnv` for the environments of all ranks. peers None: there are
    no others."""

    def __init__(self, own: VectorEnv, shares: Shares, peers: Peers | None) -> None:
        self._own, self._shares, self._peers = own, shares, peers
        self._numbers = [shares.of(rank) for rank in range(shares.ranks)]
        self.rows = shares.rows

    def observations(self) -> np.ndarray:
        """[num_envs,D], raw: what the next actions answer to."""
        for rank in range(1, self._shares.ranks):
            self._order(Order(), rank)
        found = [self._own.observations, *self._answers()]
        whole = np.empty((self._shares.num_envs, found[0].shape[1]), found[0].dtype)
        for numbers, part in zip(self._numbers, found, strict=True):
            whole[numbers] = part
        return whole

    def send(self, actions: np.ndarray, stage: int, idle: np.ndarray | None = None) -> None:
        """Begin a stage's step, of every rank."""
        if self._peers is None:
            self._own.send(actions, stage, idle)
            return
        for rank in reversed(range(self._shares.ranks)):  # the others begin first
            part = self._shares.part(rank)
            order = Order(stage, actions[part], None if idle is None else idle[part])
            if rank:
                self._order(order, rank)
            else:
                self._own.send(actions[part], stage, order.idle)

    def receive(self, stage: int) -> StepResult:
        """The end of a stage's step, of every rank; environments are numbered in the whole."""
        own = self._own.receive(stage)
        return own if self._peers is None else _joined([own, *self._answers()], self._numbers)

    def _order(self, order: Order, rank: int) -> None:
        assert self._peers is not None
        self._peers.orders.put(order, key=rank)

    def _answers(self) -> list[Any]:
        """One of each other rank, in their order."""
        return [self._peers.answers.get(key=rank) for rank in range(1, self._shares.ranks)] if self._peers else []


def follow_orders(envs: VectorEnv, rank: int, peers: Peers, done: Callable[[int], None]) -> None:
    """Simulate as rank 0 says until it closes `peers.orders`; `done(steps)` is called before every step."""
    steps = 0
    while True:
        try:
            order = peers.orders.get(key=rank)
        except ChannelClosed:
            return
        if order.actions is None:
            peers.answers.put(envs.observations, key=rank)
            continue
        done(steps)
        envs.send(order.actions, order.stage, order.idle)
        peers.answers.put(envs.receive(order.stage), key=rank)
        steps += 1


def _joined(results: Sequence[StepResult], numbers: Sequence[np.ndarray]) -> StepResult:
    if len(results) == 1:
        return results[0]
    arrays = ("observations", "rewards", "terminated", "truncated", "ended", "invalid", "final_observations")
    episodes = [
        replace(episode, env_index=int(numbers[rank][episode.env_index]))
        for rank, result in enumerate(results)
        for episode in result.episodes
    ]
    whole = {name: np.concatenate([getattr(result, name) for result in results]) for name in arrays}
    return StepResult(**whole, episodes=episodes, failures=sum(result.failures for result in results))


def joined_states(states: Sequence[Mapping[str, Any]], shares: Shares) -> dict[str, Any]:
    """The `VectorEnv.state_dict` of all environments together, made of those of the ranks."""
    width = len(states[0]["observations"]) // len(states[0]["envs"])
    observations: list[bytes] = [b""] * shares.num_envs
    envs: list[Any] = [None] * shares.num_envs
    for rank, state in enumerate(states):
        for own, number in enumerate(shares.of(rank).tolist()):
            observations[number] = state["observations"][own * width : (own + 1) * width]
            envs[number] = state["envs"][own]
    whole = {"num_envs": shares.num_envs, "observations": b"".join(observations), "envs": envs}
    return {**states[0], **whole}
