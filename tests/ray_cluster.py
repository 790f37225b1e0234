"""Ray on this machine for tests: one that has started, and a cluster of several nodes, which runs join."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from waiting import assert_gone

from rl_platform.runtime.ray.cluster_start import OWN_SETTINGS

T = TypeVar("T")
STARTS = 3


def start_ray(start: Callable[[], T]) -> T:
    """Returns what `start` returns, at its third try at the latest.

    A node of Ray ends if one of its helper processes needs more than 15 s to start, a limit that cannot be changed.
    A crowded machine may miss it. `rl_platform.runtime.ray.cluster_start` tries as often.
    """
    before = set(psutil.Process().children(recursive=True))
    for left in reversed(range(STARTS)):
        try:
            return start()
        except Exception:
            import ray

            ray.shutdown()
            started = set(psutil.Process().children(recursive=True)) - before
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            assert_gone(list(started))
            if not left:
                raise
    raise AssertionError("every try returns or raises")


@contextmanager
def ray_cluster(*cores: int, store_mib: int, pools: Sequence[str] = (), gpus: Sequence[int] = ()) -> Iterator[str]:
    """Yields the address of a cluster with a node per entry of `cores`, the head first; no process is left of it.

    pools: the label `pool` of each node. gpus: its pretended GPUs.
    """
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp")
    Path(folder, "ray").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        name = "RAY_worker_register_timeout_seconds"  # after which a run that joins would wait without end
        environment.setenv(name, OWN_SETTINGS[name])

        def start() -> Cluster:
            cluster = Cluster()
            for count, pool, pretended in zip_longest(cores, pools, gpus):
                labels = {} if pool is None else {"pool": pool}
                unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
                sizes = {"num_cpus": count, "num_gpus": pretended or 0, "object_store_memory": store_mib * 2**20}
                cluster.add_node(**sizes, labels=labels, **unused)
            return cluster

        with pytest.MonkeyPatch.context() as patched:  # no run uses the server of jobs and of the dashboard
            patched.setattr(Node, "start_api_server", lambda *_, **__: None)
            cluster = start_ray(start)
        parents = psutil.Process().children()  # later ones are servers of the session that a test needed first
        try:
            yield cluster.address
        finally:
            started = {each for parent in parents for each in _with_children(parent)} - before
            cluster.shutdown()
            try:
                assert_gone(list(started))
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
