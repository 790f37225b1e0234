"""Which runtime a run gets, and clusters that cannot be joined."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import PlacementError, RayLost, WorkerDied
from rl_platform.launch import session
from rl_platform.launch.command import Arguments, _carry_out
from rl_platform.launch.placed_config import load
from rl_platform.launch.runtime_choice import runtime_for
from rl_platform.runtime import cpu
from rl_platform.runtime.ray import cluster_start
from rl_platform.runtime.ray.cluster_start import ray_cluster

BFLOAT16 = "actor.model.dtype=bfloat16"
APART = "cluster.component_placement={actor_critic: 0, 'env,rollout': 1}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["cluster.runtime=ray"], True),
        (["cluster.address=auto"], True),
        (["cluster.devices_per_node=2", APART], True),
        (["cluster.devices_per_node=1"], False),
    ],
)
def test_processes_are_made_where_they_are_asked_for_or_needed(folder: Path, overrides: list[str], expected: bool):
    loaded, placement, _ = load("embodied.yaml", overrides)
    assert placement.uses_ray(loaded.config.cluster) is expected


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ([], 1, (True, False)),
        (
            ["actor.model.type=vla", "actor.model.path=folder", "actor.model.instruction=go", BFLOAT16],
            1,
            (False, False),
        ),
        (["runner.matmul_precision=highest", "runner.deterministic=true"], 1, (False, True)),
        (["runner.matmul_precision=high", "runner.deterministic=true"], 0, (False, False)),
    ],
)
def test_arithmetic_of_gpus_within_a_run(
    folder: Path, overrides: list[str], gpus: int, expected: tuple[bool, bool]
) -> None:
    def settings() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()

    loaded, placement, _ = load("embodied.yaml", [f"cluster.gpus_per_node={gpus}", *overrides])
    before = settings()
    with runtime_for(loaded.config, placement):
        assert settings() == expected
    assert settings() == before


@pytest.mark.parametrize("gpus", [0, 1])
def test_freed_memory_is_kept_on_cpus_only(folder: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(session, "run", lambda *_: calls.append("run"))
    placed = load("embodied.yaml", [f"cluster.gpus_per_node={gpus}"])
    given: Any = {one.name: None for one in fields(Arguments)} | {"config": "embodied.yaml", "overrides": []}
    _carry_out(Arguments(**given), placed)
    assert calls == (["run"] if gpus else ["keep", "run"])


def priority_and_arenas(report: str) -> tuple[int, int]:
    """Of the process that calls: its niceness, and from how many arenas its C library allocates (malloc_info(3))."""
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.fopen(report.encode(), b"w"))
    library.malloc_info(0, stream)
    library.fclose(stream)
    return os.getpriority(os.PRIO_PROCESS, 0), Path(report).read_text().count("<heap nr=")


def test_processes_of_an_own_ray_have_the_launchers_priority_one_arena_and_their_share_of_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And there is none of an autoscaler, of a log monitor and of a dashboard, which Ray has no option against.

    A late call, as of a thread that watches the run, does not start another Ray.
    """
    import ray

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")  # until the test is over
    before, others = torch.get_num_threads(), psutil.Process().children()
    torch.set_num_threads(6)
    try:
        with ray_cluster(Cluster(component_placement={}), processes=2):
            helpers = [" ".join(each.cmdline()) for each in psutil.Process().children() if each not in others]
            threads = ray.get(ray.remote(os.getenv).remote("OMP_NUM_THREADS"))
            if sys.platform == "linux":  # the allocator is glibc's
                settings = ray.get(ray.remote(priority_and_arenas).remote(str(tmp_path / "report.xml")))
                assert settings == (os.getpriority(os.PRIO_PROCESS, 0), 1)
    finally:
        torch.set_num_threads(before)
    assert threads == "3"
    with pytest.raises(ray.exceptions.RaySystemError, match="Ray has not been started"):
        ray.remote(os.getenv).remote("OMP_NUM_THREADS")
    assert not ray.is_initialized()
    assert len([words for words in helpers if "gcs_server" in words or "raylet" in words]) >= 2
    assert [words for words in helpers if "monitor.py" in words or "dashboard.py" in words] == []


@pytest.mark.parametrize("failures", [2, 3])
def test_ray_is_started_again_if_a_crowded_machine_missed_its_time(monkeypatch: pytest.MonkeyPatch, failures: int):
    import ray

    starts: list[str] = []

    def init(_temp_dir: str, **options: object) -> None:
        starts.append(_temp_dir)
        if len(starts) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    started = ray_cluster(Cluster(component_placement={}))
    if failures == 3:
        with pytest.raises(WorkerDied, match="Ray did not start on this machine: The current node timed out"), started:
            pass
    else:
        with started:
            pass
    assert len(starts) == 3
    assert not Path(starts[0]).parent.exists()


def test_the_end_of_ray_spares_other_children_of_the_launcher(monkeypatch: pytest.MonkeyPatch):
    """A tracker's process works until the end of the run, which may move to another placement before."""
    import ray

    def init(_temp_dir: str, **options: object) -> None:
        started = subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait", _temp_dir], stdout=subprocess.PIPE)
        assert started.stdout is not None
        started.stdout.readline()

    def children() -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster_start, "ENDING_S", 0.2)
    before = children()
    with ray_cluster(Cluster(component_placement={})):
        tracker = psutil.Popen(["sleep", "60"])
        assert [process.name() for process in children() if process not in before].count("sleep") == 2
    try:
        assert [process for process in children() if process not in before] == [tracker]
    finally:
        tracker.kill()
        tracker.wait()


def test_an_address_where_nobody_answers_is_told_soon(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(cluster_start, "_connect", lambda **_: pytest.fail("Ray would try for minutes"))
    joined = ray_cluster(Cluster(component_placement={}, address=address))
    with pytest.raises(PlacementError, match="no Ray cluster can be joined") as refused, joined:
        pass
    assert refused.value.problems[0].key == "cluster.address"


def test_a_ray_that_does_not_start_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    @contextmanager
    def hanging(*_: object) -> Iterator[None]:
        started.wait()
        yield

    monkeypatch.setattr(cluster_start, "ray_cluster", hanging)
    placed = load("embodied.yaml", ["cluster.runtime=ray", "cluster.start_timeout_s=0.2"])
    try:
        with (
            pytest.raises(RayLost, match=r"Ray did not start within 0.2 s \(cluster.start_timeout_s\)"),
            runtime_for(placed.config, placed.placement),
        ):
            pass
    finally:
        started.set()
