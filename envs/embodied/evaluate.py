"""Evaluation episodes: fixed seeds, raw rewards, every seed's episode counted exactly once.

The policy is a function of raw observations; normalising them with frozen statistics is its business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rl_platform.envs.embodied.success import Success
from rl_platform.envs.embodied.vector import EpisodeStats, VectorEnv

PolicyFunction = Callable[[np.ndarray], np.ndarray]
"""observations [N,D] float32 -> actions [N,A] float or [N] integer; of a policy in chunks [N,K,A] or [N,K]."""


@dataclass(frozen=True)
class EvaluationResult:
    """Sums of raw rewards, numbers of steps and successes (None: not said), in order of seed; `invalid` episodes are
    counted and left out. numbers: of the others, from 0; episode k runs in environment k modulo their count."""

    returns: list[float]
    lengths: list[int]
    invalid: int
    successes: list[Success | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


Begin = Callable[[int], None]
"""Called with the number of environments when each of them has begun an episode, before the policy is asked."""


def one_by_one(policy: PolicyFunction) -> PolicyFunction:
    """Gives the actions of a policy's chunks out one after another, and asks it when there is none left.

    To be made anew where episodes begin: all environments are then at the same action of their chunks.
    """
    chunk: deque[np.ndarray] = deque()

    def act(observations: np.ndarray) -> np.ndarray:
        if not chunk:
            chunk.extend(np.swapaxes(policy(observations), 0, 1))
        return chunk.popleft()

    return act


def evaluate(
    envs: VectorEnv,
    policy: PolicyFunction,
    episodes: int,
    seed: int,
    *,
    chunked: bool = False,
    begin: Begin | None = None,
    on_ended: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Run the episodes of seeds seed..seed+episodes-1 on `envs`, which must not be those that train.

    Environments run one episode each per wave; one that is done waits (stepping on, uncounted) for the wave's longest.
    The result does not depend on how many environments or workers there are, if a seed determines its episode.
    `chunked`: the policy gives several actions at a time; `begin`: for one that remembers its episode. `on_ended`
    is called after each step with the number of episodes that have ended.
    """
    outcomes: dict[int, EpisodeStats | None] = {}
    for first in range(0, episodes, envs.num_envs):
        # the last wave may need fewer: the others repeat its seeds and are not counted
        offsets = [first + i if first + i < episodes else first for i in range(envs.num_envs)]
        running = {i: offset for i, offset in enumerate(offsets) if first + i < episodes}
        observations = envs.reset([seed + offset for offset in offsets])
        if begin is not None:
            begin(envs.num_envs)
        act = one_by_one(policy) if chunked else policy
        while running:
            result = envs.step(act(observations))
            observations = result.observations
            stats = {episode.env_index: episode for episode in result.episodes}
            for i in np.flatnonzero(result.ended).tolist():
                if i in running:
                    outcomes[running.pop(i)] = stats.get(i)
            if on_ended is not None:
                on_ended(len(outcomes))
    ended = {offset: episode for offset, episode in sorted(outcomes.items()) if episode is not None}
    valid = list(ended.values())
    return EvaluationResult(
        returns=[episode.return_ for episode in valid],
        lengths=[episode.length for episode in valid],
        invalid=episodes - len(valid),
        successes=[episode.success for episode in valid],
        numbers=list(ended),
    )
