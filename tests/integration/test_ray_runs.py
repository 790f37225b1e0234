"""Runs on Ray: placements learn what one process learns and swap as planned; no process outlives its run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from waiting import HANG_S, assert_gone, command_line

pytestmark = pytest.mark.usefixtures("forked_workers")
STEPS = 3
LOST_S = 15.0  # promised: from the death of Ray to the end of the run
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
    "taking turns": [
        "cluster.devices_per_node=2",
        "cluster.component_placement={'actor,critic': 0-1, rollout: 1, reward: 0}",
        *(f"{name}.offload=true" for name in ("actor", "critic", "rollout")),
    ],
}


@pytest.fixture
def learned_now(command, final_state):
    """learned_now(file, *overrides): the checkpoint after three steps of a run in the folder `out`."""

    def run(file: str, *overrides: str) -> dict[str, Any]:
        shutil.rmtree("out", ignore_errors=True)
        ended = command(file, *overrides, f"runner.max_steps={STEPS}", "runner.output_dir=out")
        assert ended.code == 0, ended.err
        return final_state("out", STEPS)

    return run


def sessions() -> set[Path]:
    """The folders of Ray clusters that this process started."""
    return set(Path("/tmp").glob(f"rl-*/ray/session_*_{os.getpid()}"))


@pytest.fixture
def nothing_left(address: str) -> Iterator[None]:
    """Every process that a test started is gone soon after it, and so are the files of its Ray."""
    before, folders = set(psutil.Process().children(recursive=True)), sessions()
    yield
    assert_gone(list(set(psutil.Process().children(recursive=True)) - before))
    assert sessions() == folders, "files of Ray are left"


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


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the classes that this process exports to Ray's other processes."""
    from ray._private.function_manager import FunctionActorManager

    names, export = list[str](), FunctionActorManager.export_actor_class

    def noted(self: Any, of: type, *others: Any) -> None:
        names.append(of.__name__)
        export(self, of, *others)

    monkeypatch.setattr(FunctionActorManager, "export_actor_class", noted)
    return names


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_learns_what_one_process_learns(
    learned, learned_now, joins: str, scored: str, exported: list[str], name: str
) -> None:
    expected, _ = learned("reasoning.yaml", scored, steps=STEPS)
    joined = [joins] if name != "shared" else []  # it starts its own, as runs below do that are killed
    assert_equal(learned_now("reasoning.yaml", scored, *REASONING[name], *joined), expected)
    assert len(exported) == 1, "each process of the run would export its class again"
    parts = 4 if "apart" in name else 1  # evaluated while others are generated, or all at once
    for learner in ("actor", "critic"):
        lane = f"runner ({learner})" if name == "each learner apart" else "runner"  # side by side, or in turns
        assert f"train {learner}" in [phase for phase, *_ in spans(lane, "phase")]
    tokens = [json.loads(line)["step"] for line in Path("out/tokens.jsonl").read_text().splitlines()]
    for lane, logged_steps in (("actor[0]", len(set(tokens))), ("critic[0]", 0)):  # log-probs after the update
        assert calls(lane).count("evaluate") == parts * STEPS + logged_steps, lane
    for lane in ("actor[0]", "critic[0]", "rollout[0]"):
        swaps = {"offload", "onload"}.intersection(calls(lane))
        assert swaps == ({"offload", "onload"} if name == "taking turns" else set()), lane
    logged = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [step for step in logged if "weights/bytes" in step]
    assert len(steps) == STEPS
    for step in steps:  # in one process the rollout reads the weights where they are
        assert step["actor/grad_norm"] > 0, "else nothing is learned and nothing compared"
        assert (step["weights/bytes"] > 0) == (name != "shared")


@pytest.mark.usefixtures("nothing_left")
def test_apart_a_rollout_one_update_old_is_generated_before_the_weights_change(
    learned_now, joins: str, scored: str
) -> None:
    one_ahead = "reasoning.yaml", scored, "runner.max_staleness=1", "algorithm.rollout_is={}"
    expected = learned_now(*one_ahead)
    apart = "cluster.component_placement={'actor,critic': 0, 'rollout,reward': 1}"
    assert_equal(learned_now(*one_ahead, "cluster.devices_per_node=2", apart, joins), expected)
    logged = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    validated = [step["step"] for step in logged if "val/score" in step]
    generated = [began for name, began, _ in spans("rollout[0]") if name == "generate"]
    published = [began for name, began, _ in spans("actor[0]") if name == "publish"]
    assert len(published) == STEPS + 1
    for step in range(1, STEPS + 1):  # the rollouts of all steps so far, and of the next one
        validations = sum(earlier < step for earlier in validated)
        rollouts = sum(began < published[step] for began in generated) - validations
        assert rollouts == min(step + 1, STEPS)


@pytest.mark.usefixtures("nothing_left")
def test_apart_rollouts_several_updates_old_are_those_of_one_process(learned_now, joins: str, scored: str) -> None:
    """The learner's process stores older weights, which the rollout reads while the learner works."""
    ahead = "reasoning.yaml", scored, "runner.max_staleness=2", "algorithm.rollout_is={}"
    expected = learned_now(*ahead)
    apart = "cluster.component_placement={'actor,critic': 0, 'rollout,reward': 1}"
    settings = "cluster.devices_per_node=2", apart, joins, "rollout.sync=delta"
    assert_equal(learned_now(*ahead, *settings), expected)


@pytest.mark.usefixtures("nothing_left")
def test_apart_environments_that_step_during_updates_see_those_of_one_process(learned_now, joins: str) -> None:
    ahead = "embodied.yaml", "runner.max_staleness=2", "algorithm.rollout_is={}", "env.normalize_observations=true"
    expected = learned_now(*ahead)
    apart = "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}"
    assert_equal(learned_now(*ahead, "cluster.devices_per_node=2", apart, joins), expected)


@pytest.mark.usefixtures("nothing_left")
def test_apart_a_rollout_loads_weights_while_it_generates(learned_now, joins: str, scored: str) -> None:
    keys = "reasoning.yaml", scored, "runner.max_staleness=1", "algorithm.rollout_is={}", "rollout.backend=torch"
    apart = "cluster.component_placement={'actor,critic': 0, rollout: '1:0-1', reward: 1}"  # two ranks on one device
    state = learned_now(*keys, "cluster.devices_per_node=2", apart, joins, "rollout.on_update=abort")
    counts = state["run"]["task"]["samples"]["counts"]
    assert counts == {"issued": STEPS * 8, "trained": STEPS * 8, "rejected": 0, "dropped": 0}
    logged = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert all(row["staleness/max"] <= 1 for row in logged if "staleness/max" in row)


Launched = Callable[..., tuple[Any, list[psutil.Process]]]


@pytest.fixture
def processes_of(ray_forks) -> Callable[[Any], list[psutil.Process]]:
    """processes_of(run): all of its processes; its workers are forks of another one."""
    before = ray_forks.workers()
    return lambda run: [*psutil.Process(run.pid).children(recursive=True), *(ray_forks.workers() - before)]


@pytest.fixture
def launched(start, folder: Path, processes_of) -> Launched:
    """launched(*overrides): an endless run on Ray after its first step, and all of its processes.

    The run pauses after each step, because it would otherwise occupy all cores until its end.
    """
    (folder / "pause.py").write_text("import time\n\ndef pause(step, metrics):\n    time.sleep(0.5)\n")

    def run(*overrides: str, forked_workers: bool = True) -> tuple[Any, list[psutil.Process]]:
        endless = "embodied.yaml", "runner.max_steps=100000", "runner.save_interval=1", "runner.callbacks=[pause:pause]"
        process = start(*endless, *overrides, forked_workers=forked_workers)
        process.until(lambda: list(folder.glob("out/checkpoints/step-*")))
        return process, processes_of(process)

    return run


def hosts_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those in which components run."""
    return [process for process in processes if "HostActor" in command_line(process)]


def named(processes: list[psutil.Process], name: str) -> psutil.Process:
    (found,) = (process for process in processes if process.name() == name)
    return found


def assert_lost(process: Any, started: list[psutil.Process], what: str) -> None:
    """The run ends in time with exit code 75, names `what` and the step it goes on from, and leaves no process."""
    began = time.monotonic()
    _, errors = process.communicate(timeout=HANG_S)
    assert time.monotonic() - began < LOST_S
    assert process.returncode == 75, errors
    assert f"RayLost: {what} at " in errors
    assert "the same command goes on from step" in errors
    assert "Traceback" not in errors
    assert_gone(started)


LOST = [("gcs_server", "Ray's head"), pytest.param("raylet", "Ray's raylet", marks=pytest.mark.release)]


@pytest.mark.parametrize(("name", "what"), LOST)
def test_a_run_without_its_ray_goes_on_with_a_new_one(
    launched, processes_of, folder: Path, name: str, what: str
) -> None:
    process, started = launched("cluster.runtime=ray", "cluster.restart_backoff_s=0.5")
    named(started, name).kill()
    assert_gone(started)
    checkpoints = set(folder.glob("out/checkpoints/step-*"))
    process.until(lambda: set(folder.glob("out/checkpoints/step-*")) - checkpoints)
    again = processes_of(process)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 143, errors
    assert "resumed from step" in out
    assert f"{what} at " in errors
    assert "the run starts again from its newest checkpoint in 0.5 s, restarts left: 2" in errors
    assert "Traceback" not in errors
    assert_gone(again)
    steps = [json.loads(line)["step"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize(
    ("name", "what"), [pytest.param("gcs_server", "Ray's head", marks=pytest.mark.release), ("raylet", "Ray's raylet")]
)
def test_a_run_without_its_ray_ends_with_a_way_to_go_on(launched, name: str, what: str) -> None:
    process, started = launched("cluster.runtime=ray", "cluster.restarts=0")
    named(started, name).kill()
    assert_lost(process, started, what)
    assert not list(Path("/tmp").glob(f"rl-*/ray/session_*_{process.pid}")), "files of Ray are left"


CLUSTER = """
import os, time
from ray_cluster import ray_cluster
from ray_forks import fork_workers
setattr(*fork_workers())
with ray_cluster(2, store_mib=256) as address:
    print(address, os.environ["RAY_TMPDIR"], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def joinable() -> Iterator[tuple[str, psutil.Process]]:
    """The address of a Ray cluster and the process that has started it; nothing of it is left."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        address, folder = other.stdout.readline().split()
        starter = psutil.Process(other.pid)
        yield address, starter
        for process in [*starter.children(recursive=True), starter]:
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_joined_cluster_without_its_head_ends_the_run_with_a_way_to_go_on(
    launched, joinable: tuple[str, psutil.Process]
) -> None:
    address, starter = joinable
    process, own = launched(f"cluster.address={address}", "cluster.restarts=0")
    hosts = hosts_of(own)
    assert hosts
    started = psutil.Process(process.pid).children(recursive=True)  # other workers of the cluster stay
    named(starter.children(recursive=True), "gcs_server").kill()
    assert_lost(process, [*started, *hosts], "Ray's head")


def test_another_user_reaches_nothing_of_a_run_and_nothing_outlives_its_launcher(launched, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(home))
        for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            environment.delenv(name, raising=False)
        placement = "cluster.component_placement={actor_critic: 0-1, 'rollout,env': 2}"
        process, started = launched("cluster.devices_per_node=3", placement, forked_workers=False)
    assert not (home / ".ray").exists()
    assert len(hosts_of(started)) == 3

    if sys.platform == "linux":  # psutil reads sockets from /proc
        sockets = [found for one in [psutil.Process(process.pid), *started] for found in listening(one)]
        assert len(sockets) >= 8, "of Ray's head, its raylet, all hosts, the launcher and the two learners"
        reached = {found.laddr.ip for found in sockets}
        assert {ip.removeprefix("::ffff:") for ip in reached} <= {"127.0.0.1", "::1"}

    (session,) = Path("/tmp").glob(f"rl-*/ray/session_*_{process.pid}")
    closed = session.parent.parent
    token = closed / "token"
    assert [path.stat().st_mode & 0o777 for path in (closed, token)] == [0o700, 0o600]

    address = re.search(r"--gcs-address=(\S+)", " ".join(named(started, "raylet").cmdline()))
    assert address is not None
    assert joined(address[1], token.read_text(), patience_s=60) == "joined", "else the next line says nothing"
    assert joined(address[1], "0" * 64) != "joined"
    assert joined(address[1], None) != "joined"

    process.kill()
    process.communicate(timeout=HANG_S)
    assert_gone(started)


def listening(process: psutil.Process) -> list[Any]:
    return [found for found in process.net_connections("inet") if found.status == psutil.CONN_LISTEN]


def joined(address: str, token: str | None, patience_s: int = 5) -> str:
    """What becomes of another Ray process that connects with this token."""
    code = f"from ray._raylet import GcsClient; GcsClient(address='{address}').get_all_node_info(timeout={patience_s})"
    secret = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | secret,
            capture_output=True,
            text=True,
            timeout=15 + patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer"
    return "joined" if ended.returncode == 0 else ended.stderr
