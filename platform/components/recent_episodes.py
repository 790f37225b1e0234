"""The last episodes of a run, over which the metrics `episode/` and `env/success_` are means."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from rl_platform.components.env_tasks import EnvTasks
from rl_platform.envs.embodied.success import Success, success_rates
from rl_platform.envs.embodied.vector import EpisodeStats
from rl_platform.records import StateDict

RECENT_EPISODES = 100

Episode = tuple[float, int, int, Success | None]  # return, length, number of the environment, success


class RecentEpisodes:
    """The last `RECENT_EPISODES` episodes and the means of their returns, lengths and successes."""

    def __init__(self, tasks: EnvTasks) -> None:
        self._tasks = tasks
        self._episodes: deque[Episode] = deque(maxlen=RECENT_EPISODES)

    def add(self, episodes: Iterable[EpisodeStats]) -> None:
        self._episodes.extend((one.return_, one.length, one.env_index, one.success) for one in episodes)

    def metrics(self) -> dict[str, float]:
        """Returns mean return and length, success rates, and the metrics per task; {} without an episode."""
        if not self._episodes:
            return {}
        returns, lengths, numbers, successes = zip(*self._episodes, strict=True)
        means = np.mean(list(zip(returns, lengths, strict=True)), axis=0).tolist()
        metrics = dict(zip(("episode/return", "episode/length"), means, strict=True))
        return metrics | self._tasks.metrics("env", numbers, returns, successes) | success_rates(successes, "env")

    def state_dict(self) -> StateDict:
        return {
            "recent_episodes": [(return_, length) for return_, length, _, _ in self._episodes],
            "recent_numbers": [number for _, _, number, _ in self._episodes],
            "recent_successes": [success and tuple(success) for *_, success in self._episodes],
        }

    def load_state_dict(self, state: StateDict) -> None:
        successes = [success and Success(*success) for success in state["recent_successes"]]
        episodes = zip(state["recent_episodes"], state["recent_numbers"], successes, strict=True)
        self._episodes = deque(((*episode, number, success) for episode, number, success in episodes), RECENT_EPISODES)
