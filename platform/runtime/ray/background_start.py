"""Starts Ray while the launcher reads models."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import RayLost
from rl_platform.runtime.ray.cluster_start import ray_cluster


@contextmanager
def ray_in_background(cluster: Cluster, hosts: int) -> Iterator[Callable[[], None]]:
    """Starts Ray for this number of hosts, and returns a function that waits until it runs.

    That function raises the error that prevented Ray's start, RayLost after `cluster.start_timeout_s`. Ray ends with
    the block.
    """
    ray, entered, over = ray_cluster(cluster, hosts), Future[None](), threading.Event()
    limit_s = min(cluster.start_timeout_s, threading.TIMEOUT_MAX)

    def enter() -> None:
        try:
            ray.__enter__()
        except BaseException as error:
            entered.set_exception(error)
        else:
            entered.set_result(None)
            over.wait()  # Ray's processes end with the thread that has started them

    def wait() -> None:
        if not concurrent.futures.wait([entered], limit_s).done:
            raise RayLost(f"Ray did not start within {limit_s:g} s (cluster.start_timeout_s)")
        entered.result()

    threading.Thread(target=enter, name="ray start", daemon=True).start()  # if it hangs, the command ends without it
    try:
        yield wait
    finally:
        given_up = isinstance(sys.exception(), RayLost)
        try:
            if concurrent.futures.wait([entered], 0 if given_up else limit_s).done and entered.exception() is None:
                ray.__exit__(*sys.exc_info())
        finally:
            over.set()
