"""A Ray cluster that the runs of a file of tests join."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ENDED_S = 10.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster that the runs of this module join one after the other; no process is left of it."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp")
    Path(folder, "ray").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, object_store_memory=256 * 2**20, include_dashboard=False)
            yield cluster.address
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            cluster.shutdown()
    _, left = psutil.wait_procs(started, ENDED_S)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left
