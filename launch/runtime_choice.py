"""Selects the runtime of a run and applies the settings of its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from rl_platform import acceleration
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.extras import required
from rl_platform.interrupts import take_back
from rl_platform.numerics import computing
from rl_platform.placement.scheduler import Placement
from rl_platform.runtime import Runtime
from rl_platform.runtime.local import LocalRuntime


@contextmanager
def runtime_for(
    config: Config, placement: Placement, cluster_is_up: Callable[[], None] | None = None
) -> Iterator[Runtime]:
    """Returns the runtime of a run, and applies the keys of `runner` for its processes. It ends with the block.

    Raises WorkerDied if Ray does not start, RayLost if that takes longer than `cluster.start_timeout_s`.

    `cluster_is_up`: the function of an enclosing `cluster_for`. Without it this block starts and ends the cluster.
    """
    with ExitStack() as stack:
        (cluster_is_up or stack.enter_context(cluster_for(config.cluster, placement)))()
        stack.enter_context(acceleration.accelerating(config.runner.accelerate))
        stack.enter_context(_computing(config, placement))
        if (stop_waiting_passively := acceleration.find("wait_passively_when_crowded")) is not None:
            stack.callback(stop_waiting_passively)
        deadline_s, seed, start_s = config.runner.deadline_s, config.runner.seed, config.cluster.start_timeout_s
        if not placement.uses_ray(config.cluster):
            yield stack.enter_context(LocalRuntime(placement, deadline_s, seed, start_s))
            return
        take_back()
        from rl_platform.runtime.ray.runtime import RayRuntime

        trace, cluster = config.runner.trace_steps > 0, config.cluster
        options = trace, cluster.restarts, start_s, cluster.collective_timeout_s
        yield stack.enter_context(RayRuntime(placement, deadline_s, seed, *options))


def _computing(config: Config, placement: Placement) -> AbstractContextManager[None]:
    """Returns a context that applies `runner.matmul_precision` and `runner.deterministic` if there are accelerators."""
    runner, precision = config.runner, config.runner.matmul_precision
    if not placement.on_accelerators:
        return nullcontext()
    if precision == "auto":
        precision = "high" if config.actor.model.dtype == "float32" else "highest"
    here = not placement.uses_ray(config.cluster)
    return computing(precision, deterministic=runner.deterministic, here=here)


def cluster_for(cluster: Cluster, placement: Placement) -> AbstractContextManager[Callable[[], None]]:
    """Starts Ray in the background if the placement needs it: see `ray_in_background`, whose function it returns."""
    if not placement.uses_ray(cluster):
        return nullcontext(lambda: None)
    with required("rl_platform.runtime.ray", "cluster.runtime", hint="cluster.runtime=local"):
        from rl_platform.runtime.ray.cluster_start import ray_in_background

    return ray_in_background(cluster, len(placement.hosts))
