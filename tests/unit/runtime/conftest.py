"""One small Ray cluster per test module that needs it, and channels that live in another process of it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from ray_cluster import start_ray
from stand_ins import Placed
from waiting import HANG_S, assert_gone

GPUS = 4  # pretended: Ray hands them out, nobody computes on them


@pytest.fixture(scope="module")
def ray_cluster(forked_workers: None) -> Iterator[None]:
    """Ray with two CPUs and some pretended GPUs; afterwards no process of it is left."""
    import ray

    before = set(psutil.Process().children(recursive=True))
    folder = tempfile.mkdtemp(prefix="rl-", dir="/tmp")
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    options |= {"num_cpus": 2, "num_gpus": GPUS, "object_store_memory": 512 * 2**20, "_temp_dir": folder}
    start_ray(lambda: ray.init(**options))
    yield
    started = [child for child in psutil.Process().children(recursive=True) if child not in before]
    ray.shutdown()
    try:
        assert_gone(started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Idle:
    def __init__(self, context: Any) -> None:
        pass


@pytest.fixture(scope="module")
def ray_channel(ray_cluster: None) -> Iterator[Callable[..., Any]]:
    """ray_channel(capacity=2): a channel that lives in another process."""
    import sys

    import cloudpickle

    from rl_platform.runtime import ComponentSpec
    from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelProxy
    from rl_platform.runtime.ray.runtime import RayRuntime

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    numbers = itertools.count(1_000_000)
    with RayRuntime(Placed.of([("reward", 0)]), HANG_S, 7) as runtime:
        runtime.start({"reward": ComponentSpec(Idle)})
        registry = runtime._names.registry

        def make(capacity: int = 16, deadline_s: float = HANG_S, producers: Any = (), consumers: Any = ()) -> Any:
            where = ChannelAddress(
                next(numbers), "rollouts", "host0", capacity, deadline_s, tuple(producers), tuple(consumers)
            )
            return ChannelProxy(where, registry)

        yield make
