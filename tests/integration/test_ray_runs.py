"""Runs on Ray: placements learn what one process learns and swap as planned; no process outlives its run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

STEPS = 3
ENDED_S = 10.0
REASONING = {
    "shared": ["cluster.runtime=ray"],
    "apart, two learning ranks": [
        "cluster.devices_per_node=4",
        "cluster.component_placement={'actor,critic': 0-1, rollout: 2, reward: 3}",
        "rollout.sync=delta",
    ],
    "each learner apart": [
        "cluster.devices_per_node=4",
        "cluster.component_placement={actor: 0, critic: 1, 'rollout,reward': 2}",
    ],
    "apart, weights by a process group": [
        "cluster.devices_per_node=4",
        "cluster.component_placement={'actor,critic': 0-1, rollout: 2, reward: 3}",
        "rollout.weight_transfer=group",
    ],
    "taking turns": [
        "cluster.devices_per_node=2",
        "cluster.component_placement={'actor,critic': 0-1, rollout: 1, reward: 0}",
        *(f"{name}.offload=true" for name in ("actor", "critic", "rollout")),
    ],
}


@pytest.fixture
def learned(command, final_state):
    """learned(file, *overrides): the checkpoint's parts after three steps."""

    def run(file: str, *overrides: str) -> dict[str, Any]:
        shutil.rmtree("out", ignore_errors=True)
        ended = command(file, *overrides, f"runner.max_steps={STEPS}", "runner.output_dir=out")
        assert ended.code == 0, ended.err
        return final_state("out", STEPS)

    return run


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Every process that a test started is gone soon after it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = set(psutil.Process().children(recursive=True)) - before
    _, left = psutil.wait_procs(started, ENDED_S)
    assert not left, f"processes left: {left}"


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    """Tensors agree to 1e-6 in float32, everything else exactly."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{path}/{index}")
    else:
        assert found == expected, path


def calls(lane: str) -> list[str]:
    """The calls of a component's rank in the last run's timeline."""
    return [name for name, _, _ in spans(lane)]


def spans(lane: str, kind: str = "call") -> list[tuple[str, float, float]]:
    """(name, begin, end) of the spans of that kind in a lane of the last run's timeline."""
    events = json.loads(Path("out/trace.json").read_text())["traceEvents"]
    lanes = [event for event in events if event["name"] == "thread_name" and event["args"]["name"] == lane]
    (place,) = {(event["pid"], event["tid"]) for event in lanes}
    own = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == place]
    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in own if event["cat"] == kind]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_learns_what_one_process_learns(learned, scored: str, name: str) -> None:
    expected = learned("reasoning.yaml", scored)
    assert_equal(learned("reasoning.yaml", scored, *REASONING[name]), expected)
    parts = 4 if "apart" in name else 1  # evaluated while others are generated, or all at once
    for learner in ("actor", "critic"):
        lane = f"runner ({learner})" if name == "each learner apart" else "runner"  # side by side, or in turns
        assert f"train {learner}" in [phase for phase, *_ in spans(lane, "phase")]
    for lane in ("actor[0]", "critic[0]"):
        assert [called for called in calls(lane) if called == "evaluate"] == ["evaluate"] * parts * STEPS, lane
    for lane in ("actor[0]", "critic[0]", "rollout[0]"):
        swaps = {"offload", "onload"}.intersection(calls(lane))
        assert swaps == ({"offload", "onload"} if name == "taking turns" else set()), lane
    logged = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [step for step in logged if "weights/bytes" in step]
    assert len(steps) == STEPS
    for step in steps:  # in one process the rollout reads the weights where they are
        assert step["actor/grad_norm"] > 0, "else nothing is learned and nothing compared"
        assert (step["weights/bytes"] > 0) == (name != "shared")
    assert not list(Path("/tmp").glob(f"rl-*/session_*_{os.getpid()}")), "files of Ray are left"


@pytest.mark.usefixtures("nothing_left")
def test_apart_a_rollout_one_update_old_is_generated_before_the_weights_change(learned, scored: str) -> None:
    one_ahead = "reasoning.yaml", scored, "runner.max_staleness=1", "algorithm.rollout_is={}"
    expected = learned(*one_ahead)
    apart = "cluster.component_placement={'actor,critic': 0, 'rollout,reward': 1}"
    assert_equal(learned(*one_ahead, "cluster.devices_per_node=2", apart), expected)
    logged = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    validated = [step["step"] for step in logged if "val/score" in step]
    generated = [began for name, began, _ in spans("rollout[0]") if name == "generate"]
    published = [began for name, began, _ in spans("actor[0]") if name == "publish"]
    assert len(published) == STEPS + 1
    for step in range(1, STEPS + 1):  # the rollouts of all steps so far, and of the next one
        validations = sum(earlier < step for earlier in validated)
        rollouts = sum(began < published[step] for began in generated) - validations
        assert rollouts == min(step + 1, STEPS)


Launched = Callable[..., tuple[Any, list[psutil.Process]]]


@pytest.fixture
def launched(start, folder: Path) -> Launched:
    """launched(*overrides): an endless run on Ray after its first step, and all of its processes."""

    def run(*overrides: str) -> tuple[Any, list[psutil.Process]]:
        process = start("embodied.yaml", "runner.max_steps=100000", "runner.save_interval=1", *overrides)
        until = time.monotonic() + 120
        while not list(folder.glob("out/checkpoints/step-*")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.05)
        return process, psutil.Process(process.pid).children(recursive=True)

    return run


def hosts_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those in which components run."""
    return [process for process in processes if any("HostActor" in part for part in process.cmdline())]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, ENDED_S)
    assert not left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_soon_and_leaves_no_process(launched, number: signal.Signals, code: int) -> None:
    process, started = launched("cluster.runtime=ray")
    assert hosts_of(started)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "the same command goes on from step" in errors
    assert "Traceback" not in errors
    assert_gone(started)


def test_a_killed_learner_ends_the_run_with_a_way_to_go_on(launched) -> None:
    process, started = launched("cluster.runtime=ray")
    (host,) = hosts_of(started)
    began = time.monotonic()
    os.kill(host.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 2 * ENDED_S
    assert process.returncode == 75, errors
    assert "WorkerDied: the process of actor_critic,env,rollout[0] died" in errors
    assert "the same command goes on from step" in errors
    assert_gone(started)


def test_a_launcher_that_is_killed_takes_everything_with_it(launched) -> None:
    process, started = launched("cluster.runtime=ray")
    hosts = hosts_of(started)
    assert hosts
    process.kill()
    process.communicate(timeout=30)
    assert_gone(hosts)
    assert_gone(started)
