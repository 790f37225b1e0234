"""Evaluation episodes: fixed seeds, raw rewards, exactly one episode per seed.

The policy is a function of raw observations, which it normalises itself with frozen statistics.
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
    """Sums of raw rewards, numbers of steps and successes (None: not reported) of valid episodes, in order of seed.

    invalid: the number of invalid episodes, which the lists leave out. numbers: the indices of the valid episodes;
    episode k runs in environment k modulo the number of environments. terminated: see `EpisodeStats`.
    """

    returns: list[float]
    lengths: list[int]
    invalid: int
    successes: list[Success | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)


Begin = Callable[[int], None]
"""Called with the number of environments when each has begun an episode, before the first call of the policy."""


def one_by_one(policy: PolicyFunction) -> PolicyFunction:
    """Returns a function that yields the actions of the policy's chunks one by one.

    Create a new one when episodes begin, so that all environments are at the same action of their chunks.
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
    """Runs the episodes of seeds seed..seed+episodes-1 on `envs`, which must not be the training environments.

    In each wave an environment runs one episode. A finished environment is stepped on, uncounted, until the longest
    episode of the wave ends. The result does not depend on the number of environments or workers, if a seed determines
    its episode. `chunked`: the policy returns chunks of actions. `begin`: resets a recurrent policy. `on_ended` is
    called after each step with the number of episodes that have ended.
    """
    finished: dict[int, EpisodeStats | None] = {}
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
                    finished[running.pop(i)] = stats.get(i)
            if on_ended is not None:
                on_ended(len(finished))
    ended = {offset: episode for offset, episode in sorted(finished.items()) if episode is not None}
    valid = list(ended.values())
    return EvaluationResult(
        returns=[episode.return_ for episode in valid],
        lengths=[episode.length for episode in valid],
        invalid=episodes - len(valid),
        successes=[episode.success for episode in valid],
        numbers=list(ended),
        terminated=[episode.terminated for episode in valid],
    )
