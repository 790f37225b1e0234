"""The time limit of collective operations, for process groups that are formed beside torch's default group.

torch and Megatron give such a group a limit of their own, whatever that of the default group is.
"""

from __future__ import annotations

from datetime import timedelta

_limit = timedelta(minutes=30)  # torch's for gloo, in a process that is the only one of its run


def set_collective_limit(limit: timedelta) -> None:
    """Stores the limit of the default group (`cluster.collective_timeout_s`)."""
    global _limit
    _limit = limit


def collective_limit() -> timedelta:
    """Returns the limit of the default group."""
    return _limit
