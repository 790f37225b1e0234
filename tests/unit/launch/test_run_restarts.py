"""How often a run starts again, and how it ends if that does not help."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import HostDied, PlacementError, PlatformError, Problem, WorkerDied
from rl_platform.runtime.ray import run_restarts as module
from rl_platform.runtime.ray.run_restarts import RunRestarts


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(module.time, "sleep", found.append)
    return found


def restarts(allowed: int) -> RunRestarts:
    return RunRestarts(Cluster(component_placement={}, restarts=allowed, restart_backoff_s=10))


def failing(*errors: PlatformError | None) -> Callable[[], None]:
    left = list(errors)

    def attempt() -> None:
        if (error := left.pop(0)) is not None:
            raise error

    return attempt


def test_each_pause_is_twice_as_long_up_to_a_minute(pauses: list[float]) -> None:
    restarts(5).run(failing(*[HostDied("gone") for _ in range(5)], None))
    assert pauses == [10, 20, 40, 60, 60]


def test_thousands_of_restarts_are_no_overflow(pauses: list[float]) -> None:
    restarts(2000).run(failing(*[HostDied("gone") for _ in range(2000)], None))
    assert pauses[-1] == 60


def test_a_crash_loop_ends_with_the_last_death(pauses: list[float]) -> None:
    with pytest.raises(HostDied, match="third") as raised:
        restarts(2).run(failing(HostDied("first"), HostDied("second"), HostDied("third")))
    assert raised.value.exit_code == 75
    assert raised.value.__notes__ == [
        "the run was started again 2 times without reaching another checkpoint (cluster.restarts)"
    ]
    assert pauses == [10, 20]


def test_a_checkpoint_renews_the_budget(pauses: list[float]) -> None:
    run, left = restarts(1), [True, True, True, False]

    def attempt() -> None:
        if left.pop(0):
            run.renew()
            raise HostDied("gone")

    run.run(attempt)
    assert (pauses, run.saved) == ([10, 10, 10], True)


def test_a_cluster_that_has_become_too_small_is_tried_again_and_ends_with_75(pauses: list[float]) -> None:
    small = PlacementError([Problem("cluster.component_placement", "needs 2 nodes, but the Ray cluster has 1")])
    with pytest.raises(HostDied, match="needs 2 nodes"):
        restarts(2).run(failing(HostDied("gone"), small, small))
    with pytest.raises(PlacementError):
        restarts(2).run(failing(small))
    restarts(2).run(failing(HostDied("gone"), small, None))


def test_a_cluster_that_has_become_too_small_ends_a_run_that_trained_with_75(pauses: list[float]) -> None:
    """As after a move: a host dies on the new placement, and the previous one no longer fits into the cluster."""
    run = restarts(1)

    def attempt() -> None:
        if not pauses:
            run.renew()
        raise PlacementError([Problem("cluster.component_placement", "needs 2 nodes, but the Ray cluster has 1")])

    with pytest.raises(HostDied, match="needs 2 nodes") as raised:
        run.run(attempt)
    assert (raised.value.exit_code, pauses) == (75, [10])


@pytest.mark.parametrize("error", [WorkerDied("env worker 1 died"), PlatformError("bug")])
def test_other_errors_end_the_run(pauses: list[float], error: PlatformError) -> None:
    with pytest.raises(type(error)):
        restarts(2).run(failing(error))
    with pytest.raises(HostDied):
        restarts(0).run(failing(HostDied("gone")))
    assert pauses == []
