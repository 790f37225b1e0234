"""How much work a command was: on a busy machine the time it took says little."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest


@pytest.fixture
def cpu_seconds() -> Callable[[], float]:
    """cpu_seconds(): of the processes that this one has started since the test began and that have ended."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    return lambda: spent() - before
