"""Restarts of a whole run from its newest checkpoint, after a learner's process, a node or Ray itself ended.

The runtime restarts processes without a learner itself, and no step is lost. Not covered: the end of the
launcher itself, which a batch system or the user starts again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import HostDied, PlacementError

LONGEST_PAUSE_S = 60.0

T = TypeVar("T")
log = logging.getLogger(__name__)


class RunRestarts:
    """The restarts that `cluster.restarts` allows. saved: the run has written a checkpoint since its command began."""

    def __init__(self, cluster: Cluster) -> None:
        self.saved = False
        self._allowed, self._backoff_s = cluster.restarts, cluster.restart_backoff_s
        self._used = 0  # since the newest checkpoint

    def renew(self) -> None:
        """Allows all restarts again. Called when the run has written a checkpoint, so it is in no crash loop."""
        self.saved, self._used = True, 0

    def run(self, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt`, which is called again after a HostDied. Raises it if no restart is left.

        A run that has trained may find fewer nodes than before: a PlacementError then counts as the death of a node.
        """
        while True:
            try:
                return attempt()
            except (HostDied, PlacementError) as error:
                if isinstance(error, PlacementError) and not (self._used or self.saved):
                    raise
                if self._used == self._allowed:
                    self._give_up(error)
                reason = str(error)
            pause = min(self._backoff_s * 2.0 ** min(self._used, 100), LONGEST_PAUSE_S)
            self._used += 1
            left = self._allowed - self._used
            text = "%s; the run starts again from its newest checkpoint in %g s, restarts left: %d"
            log.warning(text, reason, pause, left)
            time.sleep(pause)

    def _give_up(self, error: HostDied | PlacementError) -> NoReturn:
        if self._used:
            error.add_note(
                f"the run was started again {self._used} times without reaching another checkpoint (cluster.restarts)"
            )
        if isinstance(error, HostDied):
            raise error
        gone = HostDied(f"the cluster has become too small or is gone: {error}")
        gone.__notes__ = error.__notes__
        raise gone from error
