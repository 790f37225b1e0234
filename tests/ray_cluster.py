"""A Ray cluster of several nodes on this machine, which runs of tests join."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ENDED_S = 10.0


@contextmanager
def ray_cluster(*cores: int, store_mib: int) -> Iterator[str]:
    """Yields the address of a cluster with a node per entry of `cores`, the head first; no process is left of it."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp")
    Path(folder, "ray").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        cluster = Cluster()
        try:
            for count in cores:
                cluster.add_node(num_cpus=count, object_store_memory=store_mib * 2**20, include_dashboard=False)
            yield cluster.address
        finally:
            started = set(psutil.Process().children(recursive=True)) - before
            cluster.shutdown()
            _, left = psutil.wait_procs(started, ENDED_S)
            shutil.rmtree(folder, ignore_errors=True)
    assert not left
