"""Decides which processes of a run are started again when they die, and how often.

One without a learner is: its components keep weights that are published again, or simulations that the runner has a
recent state of. The updates of a learner since the last checkpoint are lost with its process.
"""

from __future__ import annotations

import logging
from collections import Counter

from rl_platform.errors import WorkerDied
from rl_platform.runtime.ray.host_process import Member
from rl_platform.runtime.ray.worker_proxy import HostProxy

logger = logging.getLogger(__name__)

RESTARTABLE = frozenset({"rollout", "reward", "env"})


class Restarts:
    """`allowed`: of each host in one run."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._used: Counter[tuple[Member, ...]] = Counter()

    @property
    def count(self) -> int:
        """Processes that were started again so far, of all hosts."""
        return self._used.total()

    def possible(self, host: HostProxy) -> bool:
        """Returns whether a process may be started in its place."""
        restartable = all(component in RESTARTABLE for component, _ in host.members)
        return restartable and self._used[host.members] < self.allowed

    def check(self, host: HostProxy) -> None:
        """Raises the death of a host if it died and no process may be started in its place."""
        if host.death is None or self.possible(host):
            return
        if used := self._used[host.members]:
            again = f"{', '.join(host.labels)} was started again {used} times (cluster.restarts)"
            raise WorkerDied(f"{host.death}; {again}")
        raise host.death

    def spend(self, host: HostProxy) -> str:
        """Counts a restart of a host that died and warns of it; the name of its next process. Raises as `check`."""
        self.check(host)
        self._used[host.members] += 1
        used, names = self._used[host.members], ", ".join(host.labels)
        left = self.allowed - used
        logger.warning("%s (pid %d): %s; it is started again, restarts left: %d", names, host.pid, host.death, left)
        return f"{host.placed.name} (restart {used})"
