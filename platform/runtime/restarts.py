"""Which processes of a run are started again when they die, and how often.

A process whose components keep nothing but weights that are published again is; one with a learner or environments is
not: what it had learned or simulated since the last checkpoint is gone with it.
"""

from __future__ import annotations

import logging
from collections import Counter

from rl_platform.errors import WorkerDied
from rl_platform.runtime.process import Member
from rl_platform.runtime.remote_worker import RemoteHost

logger = logging.getLogger(__name__)

STATELESS = frozenset({"rollout", "reward"})


class Restarts:
    """`allowed`: of each host in one run."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._used: Counter[tuple[Member, ...]] = Counter()

    @property
    def count(self) -> int:
        """Processes that were started again so far, of all hosts."""
        return self._used.total()

    def possible(self, host: RemoteHost) -> bool:
        """Whether a process may be started in its place."""
        stateless = all(component in STATELESS for component, _ in host.members)
        return stateless and self._used[host.members] < self.allowed

    def spend(self, host: RemoteHost) -> str:
        """Counts a restart of a host that died and warns of it; the name of its next process.

        Raises its death if there is no further one.
        """
        assert host.death is not None
        used, names = self._used[host.members], ", ".join(host.labels)
        if not self.possible(host):
            if used:
                raise WorkerDied(f"{host.death}; {names} was started again {used} times (cluster.restarts)")
            raise host.death
        self._used[host.members] += 1
        left = self.allowed - used - 1
        logger.warning("%s (pid %d): %s; it is started again, %d restarts are left", names, host.pid, host.death, left)
        return f"{host.placed.name} (restart {used + 1})"
