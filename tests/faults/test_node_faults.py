"""Nodes of a Ray cluster that are lost: the run goes on by itself on a node that is free, with the same results."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_cluster import ray_cluster
from run_results import differences, final_state, logged
from stand_ins import Placed
from waiting import HANG_S, until

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.policy_rollout import Actions, Observations, PolicyRollout
from rl_platform.errors import WorkerDied
from rl_platform.records import RolloutBatch
from rl_platform.runners import embodied
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.host import ComponentContext

pytestmark = pytest.mark.usefixtures("one_thread")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 4
RUN = "embodied.yaml", f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.trace_steps=0"
TWO_NODES = (
    "cluster.num_nodes=2",
    "cluster.devices_per_node=1",
    "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}",
    "cluster.restart_backoff_s=1",
)


@pytest.fixture
def address() -> Iterator[str]:
    """A Ray cluster of a head that hosts no component, and three nodes, of which a run needs two."""
    with ray_cluster(0, 1, 1, 1, store_mib=128) as address:
        yield address


def lose_node(mark: str) -> None:
    """Kills this process and the raylet of its node, unless the mark of an earlier loss is there."""
    if Path(mark).exists():
        return
    raylet = psutil.Process().parent()
    assert raylet is not None
    assert raylet.name() == "raylet"
    Path(mark).touch()
    raylet.kill()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


class Shows:
    """A component that shows its process, and the accelerators that this sees."""

    def __init__(self, context: ComponentContext) -> None: ...

    def about(self) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.release
def test_a_process_that_moves_to_another_node_sees_the_accelerators_that_are_reserved_there() -> None:
    """It kept the numbers of those of its first node, which may be another run's."""
    import ray

    from rl_platform.runtime.ray.runtime import RayRuntime

    with ray_cluster(0, 1, 1, store_mib=128, gpus=(0, 1, 2)) as address:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        try:
            other = next(node for node in ray.nodes() if node["Resources"].get("GPU") == 2)
            there = NodeAffinitySchedulingStrategy(other["NodeID"], soft=False)

            class Holder:
                def numbers(self) -> list[int]:
                    return ray.get_gpu_ids()

            holder = ray.remote(Holder).options(num_gpus=1, num_cpus=0, scheduling_strategy=there)
            holders = [holder.remote() for _ in range(2)]
            held = [ray.get(one.numbers.remote()) for one in holders]
            assert sorted(held) == [[0], [1]]
            with RayRuntime(Placed.of([("rollout", 0)], accelerators=(0,)), HANG_S, 7, restarts=1) as runtime:
                rollout = runtime.start({"rollout": ComponentSpec(Shows)})["rollout"]
                pid, visible = rollout.about().wait()[0]
                assert visible == "0"
                ray.kill(holders[held.index([1])])
                raylet = psutil.Process(pid).parent()
                assert raylet is not None
                assert raylet.name() == "raylet"
                raylet.kill()
                with pytest.raises(WorkerDied) as died:
                    until(lambda: rollout.about().wait() and False)
                assert runtime.restart(died.value, lambda: None) == [("rollout", 0)]
                assert rollout.about().wait()[0][1] == "1"
        finally:
            ray.shutdown()


class LearnsOnALostNode(EmbodiedActor):
    """Its node is lost in the third step."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if step == 2:
            lose_node("lost")
        return super().update(batch, step)


class ActsOnALostNode(PolicyRollout):
    """Its node is lost in the middle of the second rollout."""

    def act(self, observations: Observations) -> Actions:
        if observations.draw[:3] == ("act", 1, 8):
            lose_node("lost")
        return super().act(observations)


LOST = {"learner": ("EmbodiedActor", LearnsOnALostNode), "rollout": ("PolicyRollout", ActsOnALostNode)}


@pytest.mark.release
@pytest.mark.parametrize("name", LOST)
def test_a_lost_node_is_replaced_by_a_free_one(command, address: str, monkeypatch, caplog, name: str) -> None:
    assert command(*RUN).code == 0
    expected: tuple[Any, Any] = final_state("out", STEPS), logged("out")
    shutil.rmtree("out")
    monkeypatch.setattr(embodied, *LOST[name])
    ended = command(*RUN, *TWO_NODES, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert Path("lost").exists(), "the fault was not injected"
    state, lines = final_state("out", STEPS), logged("out")
    assert differences(state["actor"], expected[0]["actor"]) == []
    if name == "learner":
        (warning,) = [text for text in caplog.messages if "the run starts again" in text]
        assert "actor_critic[0]" in warning
        assert "resumed from step 2" in ended.out
    names = {key for line in expected[1] for key in line if not key.startswith(("weights/", "runtime/"))}
    for line, other in zip(lines, expected[1], strict=True):
        assert {key: line.get(key) for key in names} == {key: other.get(key) for key in names}
