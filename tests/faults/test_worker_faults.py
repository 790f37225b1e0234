"""Processes of a run on Ray that are killed: the run goes on with the same results, or ends with a way to go on."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from tiny_configs import OPENAI_AGENT
from waiting import HANG_S, until

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.components.actor import EmbodiedActor, LanguageActor
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import Actions, Observations, PolicyRollout
from rl_platform.components.reward import LanguageReward
from rl_platform.components.rollout import LanguageRollout
from rl_platform.engines.training.state_files import read_whole
from rl_platform.metrics import read_metrics
from rl_platform.records import RolloutBatch, Trajectory, Weights, WeightsReceived
from rl_platform.runners import embodied, reasoning
from rl_platform.runtime.host import ComponentContext, Progress
from rl_platform.runtime.ray import weight_sender
from rl_platform.runtime.ray.runtime import RayRuntime
from rl_platform.runtime.ray.worker_proxy import WorkerProxy
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import WeightsOffer
from rl_platform.runtime.weights.weight_transfer import checksum

pytestmark = pytest.mark.usefixtures("one_thread")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL = 4096  # bytes of a bucket

STEPS, NOTICED_S, ENDED_S, GIVEN_UP_S, STOPPED_S = 3, 10.0, 20.0, 60.0, 60
RUN = [
    "reasoning.yaml",
    f"runner.max_steps={STEPS}",
    "runner.save_interval=1",
    "runner.output_dir=out",
    "data.max_response_length=6",
    "rollout.max_running_requests=1",  # one after the other: some are done, others have not begun
]
APART = ["cluster.devices_per_node=3", "cluster.component_placement={'actor,critic,reward': 0, rollout: 1-2}"]
ALL_APART = ["cluster.devices_per_node=4", "cluster.component_placement={'actor,critic': 0, rollout: 1-2, reward: 3}"]
TWO_LEARNERS = ["cluster.devices_per_node=2", "cluster.component_placement={'actor,critic,rollout,reward': 0-1}"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Trajectory]:
    """Every trajectory that is trained on, in their order."""
    found: list[Trajectory] = []
    original = reasoning.trajectory_metrics  # called once, with the whole batch

    def noted(trajectories: Any) -> dict[str, float]:
        found.extend(trajectories)
        return original(trajectories)

    monkeypatch.setattr(reasoning, "trajectory_metrics", noted)
    return found


def names(trajectories: list[Trajectory]) -> list[tuple[int, int, int]]:
    return [(one.weights_version, one.prompt.index, one.sample) for one in trajectories]


Undisturbed = tuple[dict[str, Any], list[tuple[int, int, int]]]
undisturbed_runs: list[Undisturbed] = []
undisturbed_learners: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []  # what `of_two_learners` returns


@pytest.fixture
def undisturbed(command, trained) -> Undisturbed:
    """What a run in one process, in which no process dies, learns and trains on."""
    if not undisturbed_runs:
        assert command(*RUN).code == 0
        undisturbed_runs.append((learned(STEPS), names(trained)))
    shutil.rmtree("out", ignore_errors=True)
    trained.clear()
    return undisturbed_runs[0]


def learned(step: int, *learners: str) -> dict[str, Any]:
    """Models and optimizers in the checkpoint of this step; of actor and critic if none are named."""
    checkpoint = Checkpoint.open(Path("out", "checkpoints", f"step-{step:08d}"))
    return {name: read_whole(checkpoint.file(name)) for name in learners or ("actor", "critic")}


def equal(found: Any, expected: Any) -> bool:
    """Bit for bit."""
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


def metrics(name: str) -> list[float]:
    rows = [json.loads(line) for line in Path("out", "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def lines() -> list[dict[str, Any]]:
    """Metrics and samples, without what depends on the clock."""
    texts = [Path("out", name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    return [{name: row[name] for name in row if not name.startswith(("time/", "perf/"))} for row in rows]


def kill(worker: WorkerProxy) -> None:
    """Kills the process in which this rank is."""
    process = psutil.Process(worker._host.pid)
    assert "HostActor" in " ".join(process.cmdline())
    process.kill()


def test_rollouts_that_are_killed_again_and_again(command, address, monkeypatch, folder):
    kills: list[tuple[str, float]] = []
    submit = WorkerProxy.submit

    def fatal(self: WorkerProxy, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        future = submit(self, method, args, kwargs)
        if method == "generate":
            kills.append((self.label, time.time()))
            with suppress(psutil.NoSuchProcess):  # of two that were killed, one may be noticed after the next try
                kill(self)
        return future

    monkeypatch.setattr(WorkerProxy, "submit", fatal)
    ended = command(*RUN, *APART, f"cluster.address={address}", "cluster.restarts=1")
    assert time.time() - kills[0][1] < GIVEN_UP_S
    assert ended.code == 75, ended.err
    assert sorted(label for label, _ in kills) == ["rollout[0]"] * 2 + ["rollout[1]"] * 2
    assert "was started again 1 times (cluster.restarts)" in ended.err
    assert "rollout[" in ended.err


def die_once(mark: str) -> None:
    """Kills this process, unless the mark of an earlier death is there."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def half_done(done: int, total: int) -> bool:
    return done == total // 2


@contextmanager
def dying_at(progress: Progress, due: Callable[[int, int], bool], mark: str) -> Iterator[None]:
    """The process is killed once, when the progress of its call is `due`."""
    original = progress.update

    def update(done: int, total: int, unit: str) -> None:
        original(done, total, unit)
        if due(done, total):
            die_once(mark)

    progress.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        del progress.update


class SendsSmallBuckets(LanguageActor):
    """A bucket has one of the tiny model's larger tensors."""

    def publish(self, version: int, copy: bool = False, on_request: bool = False) -> Weights:
        weight_group.BUCKET = SMALL
        return super().publish(version, copy, on_request)


class DiesInReceive(LanguageRollout):
    """Rank 1 is killed once, when half of the tensors of version 2 are in its model."""

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        if weights.version == 2 and self.context.rank == 1 and not Path("killed").exists():
            if isinstance(weights, WeightsOffer):
                buckets = [*weight_group.buckets_of(weights.tensors, SMALL)]
                assert len(buckets) > 4
                weight_group.checksum = partial(self._dying, iter(buckets[len(buckets) // 2 :]))
                return super().receive(weights)
            own = self.engine.model.state_dict(keep_vars=True)
            for name in list(weights.state)[: len(weights.state) // 2]:
                own[name].data.copy_(weights.state[name])
            die_once("killed")
        return super().receive(weights)

    def _dying(self, left: Iterator[Any], tensor: torch.Tensor) -> bytes:
        if next(left, None) is None:
            die_once("killed")
        return checksum(tensor)


class DiesWhileItGenerates(DiesInReceive):
    """Rank 1 is killed before, too, with weights version 1, when some of its responses are in the channel."""

    def generate(self, *args: Any, **kwargs: Any) -> None:
        dies = (self.context.rank, self.loaded) == (1, 1)
        with (
            dying_at(self.context.progress, lambda done, total: done == total - 1, "killed in generate")
            if dies
            else nullcontext()
        ):
            super().generate(*args, **kwargs)


def test_a_rollout_that_is_killed_while_it_generates_and_with_half_of_the_weights(
    command, address, undisturbed, trained, monkeypatch, caplog
):
    calls: list[tuple[Any, ...]] = []
    submit = WorkerProxy.submit

    def noted(self: WorkerProxy, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        if method == "generate":
            calls.append(args)
        return submit(self, method, args, kwargs)

    monkeypatch.setattr(WorkerProxy, "submit", noted)
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesWhileItGenerates)
    ended = command(*RUN, *APART, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    first, second, again, _ = [list(args[7]) for args in calls if args[6] == 1]  # two ranks, then both again
    assert (first, second) == ([], [])
    assert 1 <= len(again) < 8, "the rollout should have been killed when some were done and others not"
    assert Path("killed").exists()
    noticed = next(record.created for record in caplog.records if "is started again" in record.getMessage())
    assert noticed - Path("killed in generate").stat().st_mtime < NOTICED_S
    warnings = [text for text in caplog.messages if "is started again" in text]
    for warning, left in zip(warnings, ("restarts left: 2", "restarts left: 1"), strict=True):
        assert warning.startswith("rollout[1]")
        assert left in warning
    assert metrics("runtime/restarts") == [0, 1, 2]
    assert {one.weights_version for one in trained} == {0, 1, 2}
    assert (names(trained), metrics("perf/samples")) == (undisturbed[1], [8.0] * STEPS)
    assert equal(learned(STEPS), undisturbed[0])


def test_a_rollout_that_is_killed_while_it_is_two_updates_ahead(command, address, monkeypatch, folder):
    """Its process gets the older weights again that its responses need, and no response is lost or trained on twice."""
    steps = 5
    run = [
        *(*RUN, f"runner.max_steps={steps}", "runner.save_interval=0", "runner.max_staleness=2"),
        *("algorithm.rollout_is={}", "algorithm.group_size=2"),
        "algorithm.dynamic_sampling={max_rounds: 2, on_exhausted: fill_with_rejected}",
    ]
    assert command(*run).code == 0
    expected, ages = learned(steps), metrics("staleness/max")
    shutil.rmtree("out")
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesWhileItGenerates)
    ended = command(*run, *APART, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert Path("killed in generate").exists()
    assert Path("killed").exists()
    assert metrics("runtime/restarts")[-1] == 2
    assert metrics("staleness/max") == ages
    assert equal(learned(steps), expected)
    samples = Checkpoint.open(Path("out", "checkpoints", f"step-{steps:08d}")).load("run")["task"]["samples"]
    counts = samples["counts"]
    assert counts["trained"] == steps * 8 * 2
    assert counts["issued"] == counts["trained"] + counts["rejected"] + sum(samples["open"].values())


class DiesWhenItLeaves(LanguageRollout):
    """Killed once, by the request to leave its device to the learners of the first step."""

    def offload(self, weights: bool) -> None:
        die_once("killed")
        super().offload(weights)


def test_a_rollout_that_is_killed_when_it_leaves_its_device_is_started_again_alone(
    command, address, undisturbed, trained, monkeypatch, caplog
):
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesWhenItLeaves)
    shared = "cluster.component_placement={actor: 0, 'critic,reward': 1, rollout: 0}", "cluster.devices_per_node=2"
    ended = command(*RUN, *shared, "rollout.offload=true", f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert Path("killed").exists()
    assert not [text for text in caplog.messages if "the run starts again" in text]
    assert metrics("runtime/restarts") == [0, 1, 1]
    assert names(trained) == undisturbed[1]
    assert equal(learned(STEPS), undisturbed[0])


TALKS = """
def answer(conversation, metadata):
    return "=7"
"""
CONVERSATIONS = {
    "turns with a tool": [
        "rollout.multi_turn={tool: 'my_tools:answer', max_turns: 2, max_observation_tokens: 2, num_workers: 1}",
    ],
    "an agent with the openai client": [
        "rollout.agent={function: 'my_agent.py:solve'}",
        "data.max_response_length=12",
        "actor.model.random_init.max_positions=64",
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_rollout_that_is_killed_in_the_middle_of_conversations(
    command, address, trained, monkeypatch, folder, name: str
):
    """Conversations that have ended stay; the others begin again, with the same random numbers."""
    (folder / "my_tools.py").write_text(TALKS)
    (folder / "my_agent.py").write_text(OPENAI_AGENT)
    run = [*RUN, *CONVERSATIONS[name], "rollout.sampling={max_new_tokens: 2}"]
    assert command(*run).code == 0
    expected, rewards, whole = learned(STEPS), metrics("reward/mean"), names(trained)
    trained.clear()
    shutil.rmtree("out")
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesWhileItGenerates)
    ended = command(*run, *APART, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert Path("killed in generate").exists()
    assert metrics("runtime/restarts") == [0, 1, 2]
    assert max(metrics("turns/mean")) > 1
    assert names(trained) == whole
    assert metrics("reward/mean") == rewards
    assert equal(learned(STEPS), expected)


class DiesInUpdate(LanguageActor):
    """Rank 1 is killed once, in the middle of the second step."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        dies = (step, self.context.rank) == (1, 1)
        with dying_at(self.context.progress, half_done, "killed") if dies else nullcontext():
            return super().update(batch, step)


@pytest.fixture
def of_two_learners(command, address, folder) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """The words of a run with two ranks of each learner, and what it learns and writes if no process dies."""
    words = [*RUN, *TWO_LEARNERS, f"cluster.address={address}", "cluster.restarts=1"]
    if not undisturbed_learners:
        assert command(*words).code == 0
        undisturbed_learners.append((learned(STEPS), lines()))
        shutil.rmtree("out")
    return words, *undisturbed_learners[0]


def test_a_learner_that_is_killed_while_it_learns(command, of_two_learners, monkeypatch, caplog):
    """The run goes on from its checkpoint by itself."""
    words, expected, logged = of_two_learners
    monkeypatch.setattr(reasoning, "LanguageActor", DiesInUpdate)
    ended = command(*words, "cluster.restart_backoff_s=0")
    assert Path("killed").exists(), ended.err
    assert ended.code == 0, ended.err
    assert "resumed from step 1" in ended.out
    (warning,) = [text for text in caplog.messages if "the run starts again" in text]
    assert warning.startswith("the process of actor,critic,rollout,reward[1] died")
    assert warning.endswith("in 0 s, restarts left: 0")
    assert equal(learned(STEPS), expected)
    assert lines() == logged


class DiesInTwoUpdates(LanguageActor):
    """Rank 1 is killed in the update of the second step, and again when that step is repeated."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        deaths = Path("deaths")
        if (step, self.context.rank) == (1, 1) and not (deaths.exists() and deaths.read_text() == "xx"):
            with deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(batch, step)


def test_a_learner_that_is_killed_again_ends_the_run_and_the_same_command_goes_on(
    command, of_two_learners, monkeypatch
):
    words, expected, logged = of_two_learners
    monkeypatch.setattr(reasoning, "LanguageActor", DiesInTwoUpdates)
    run = partial(command, *words, "cluster.restart_backoff_s=0.1")
    ended = run()
    lasted = time.time() - Path("deaths").stat().st_mtime
    assert ended.code == 75, ended.err
    assert lasted < ENDED_S
    assert Path("deaths").read_text() == "xx"
    assert "HostDied: the process of actor,critic,rollout,reward[1] died" in ended.err
    assert "started again 1 times without reaching another checkpoint (cluster.restarts)" in ended.err
    assert "the same command goes on from step 1" in ended.err
    assert run().code == 0
    assert equal(learned(STEPS), expected)
    assert lines() == logged


class DiesBeforeItRequests(DiesInReceive):
    """Rank 1 is killed before, too, when rank 0 has requested the weights of version 1."""

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        if weights.version == 1 and self.context.rank == 1 and not Path("killed before").exists():
            time.sleep(1.0)
            die_once("killed before")
        return super().receive(weights)


def test_a_rollout_that_is_killed_before_it_requests_weights_and_with_half_of_those_of_a_group(
    command, address, undisturbed, trained, monkeypatch
):
    """Rank 0 does not wait for the request of a process that is dead."""
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesBeforeItRequests)
    monkeypatch.setattr(reasoning, "LanguageActor", SendsSmallBuckets)
    ended = command(*RUN, *APART, f"cluster.address={address}", "rollout.weight_transfer=group")
    assert ended.code == 0, ended.err
    first, second = (Path(name).stat().st_mtime for name in ("killed before", "killed"))
    assert second - first < weight_sender.JOIN_S
    assert metrics("runtime/restarts") == [0, 1, 2]
    assert {one.weights_version for one in trained} == {0, 1, 2}
    assert names(trained) == undisturbed[1]
    assert equal(learned(STEPS), undisturbed[0])


def test_a_rollout_that_is_killed_while_two_learners_gather(command, address, trained, monkeypatch):
    """No rank holds the weights: all gather again for the others, and again for the successor."""
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesInReceive)
    monkeypatch.setattr(reasoning, "LanguageActor", SendsSmallBuckets)
    placed = "cluster.component_placement={'actor,critic,reward': 0-1, rollout: 2-3}"
    settings = "cluster.devices_per_node=4", placed, f"cluster.address={address}", "rollout.weight_transfer=group"
    ended = command(*RUN, *settings)
    assert ended.code == 0, ended.err
    assert Path("killed").exists()
    assert metrics("runtime/restarts") == [0, 0, 1]
    assert {one.weights_version for one in trained} == {0, 1, 2}


class ReceivesDamaged(LanguageRollout):
    """Its second update."""

    def receive(self, weights: WeightsOffer) -> WeightsReceived:
        if weights.version == 2:
            weight_group.checksum = lambda tensor: checksum(tensor + 1)
        return super().receive(weights)


def test_weights_that_a_process_group_damaged_end_the_run(command, address, monkeypatch, folder):
    monkeypatch.setattr(reasoning, "LanguageRollout", ReceivesDamaged)
    ended = command(*RUN, *APART, f"cluster.address={address}", "rollout.weight_transfer=group")
    assert ended.code == 70, ended.err
    assert "weights version 2 arrived damaged: the checksum of " in ended.err
    assert "the same command goes on from step 1" in ended.err


class DiesWhileItActs(PolicyRollout):
    """Killed once, in the middle of the second rollout, with a question that it has taken and not answered."""

    def act(self, observations: Observations) -> Actions:
        if observations.draw[:3] == ("act", 1, 8):
            die_once("rollout killed")
        return super().act(observations)


class DiesWhileItSimulates(Environment):
    """Killed twice: by its first call, and in the middle of the third rollout."""

    def finds_policy(self) -> bool:
        die_once("env killed at the start")
        return super().finds_policy()

    def collect(self, step: int, *others: Any) -> Any:
        with dying_at(self.context.progress, half_done, "env killed") if step == 2 else nullcontext():
            return super().collect(step, *others)


def test_a_policy_and_a_simulation_that_are_killed_while_they_work(command, address, monkeypatch, caplog):
    settings = [
        "embodied.yaml",
        f"runner.max_steps={STEPS}",
        "runner.output_dir=out",
        "env.normalize_observations=true",
        "actor.model.type=gru",  # what it remembered is not lost with the process that asked or answered
    ]
    assert command(*settings).code == 0
    expected, returns = learned(STEPS, "actor"), metrics("episode/return")
    shutil.rmtree("out")
    monkeypatch.setattr(embodied, "PolicyRollout", DiesWhileItActs)
    monkeypatch.setattr(embodied, "Environment", DiesWhileItSimulates)
    placement = "cluster.component_placement={actor_critic: 0, rollout: 1, env: 2}"
    ended = command(*settings, "cluster.devices_per_node=3", placement, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert Path("rollout killed").exists()
    assert Path("env killed").exists()
    assert metrics("runtime/restarts") == [1, 2, 3]
    warnings = [record.getMessage() for record in caplog.records if "is started again" in record.getMessage()]
    assert [warning.split()[0] for warning in warnings] == ["env[0]", "rollout[0]", "env[0]"]
    assert metrics("episode/return") == returns
    assert equal(learned(STEPS, "actor"), expected)


class DiesWhileItReceives(PolicyRollout):
    """Killed twice, with the environments beside it: by the weights of the first step and of the third."""

    def receive(self, weights: Any) -> WeightsReceived:
        if weights.version in (0, 2):
            die_once(f"killed at {weights.version}")
        return super().receive(weights)


def test_a_policy_that_is_killed_between_rollouts_with_its_simulation(command, address, monkeypatch):
    """The environments return to where the last rollout ended: their episodes, normalisers and statistics."""
    settings = "embodied.yaml", f"runner.max_steps={STEPS}", "env.normalize_rewards=true"
    assert command(*settings).code == 0
    expected, returns = learned(STEPS, "actor"), metrics("episode/return")
    shutil.rmtree("out")
    monkeypatch.setattr(embodied, "PolicyRollout", DiesWhileItReceives)
    placement = "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}"
    ended = command(*settings, "cluster.devices_per_node=2", placement, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert metrics("runtime/restarts") == [1, 1, 2]
    assert metrics("episode/return") == returns
    assert equal(learned(STEPS, "actor"), expected)


class DiesInConstruction(LanguageRollout):
    """Rank 1 is killed once, while it is constructed."""

    def __init__(self, context: ComponentContext, *others: Any, **named: Any) -> None:
        if context.rank == 1:
            die_once("killed")
        super().__init__(context, *others, **named)


class DyingReward(LanguageReward):
    """Killed once, while it is constructed."""

    def __init__(self, *given: Any, **named: Any) -> None:
        die_once("reward killed")
        super().__init__(*given, **named)


def test_a_rollout_and_a_reward_that_are_killed_while_the_run_starts(
    command, address, undisturbed, trained, monkeypatch
):
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesInConstruction)
    monkeypatch.setattr(reasoning, "LanguageReward", DyingReward)
    build, kills = RayRuntime._build, []

    def fatal(self: RayRuntime, hosts: Any) -> None:
        if not kills:
            kills.append("rollout[0]")
            kill(self._workers["rollout", 0])  # it has come up, and knows of no component yet
        build(self, hosts)

    monkeypatch.setattr(RayRuntime, "_build", fatal)
    ended = command(*RUN, *ALL_APART, f"cluster.address={address}")
    assert ended.code == 0, ended.err
    assert Path("killed").exists()
    assert Path("reward killed").exists()
    assert metrics("runtime/restarts") == [3, 3, 3]
    assert names(trained) == undisturbed[1]
    assert equal(learned(STEPS), undisturbed[0])


PARTIAL = [
    f"rollout.stop={json.dumps(list(string.ascii_letters))}",  # so that lengths differ
    "rollout.max_running_requests=3",
    "rollout.partial_rollout={}",
    "algorithm.rollout_is={}",
]


class DiesWhileItContinues(LanguageRollout):
    """Rank 1 is killed once, in the third step, with some responses delivered and others in work."""

    def generate_until(self, groups: Any, needed: int, sampling: Any, step: int, *others: Any) -> None:
        dies = (step, self.context.rank) == (2, 1)
        with dying_at(self.context.progress, lambda done, total: done == 2, "killed") if dies else nullcontext():
            super().generate_until(groups, needed, sampling, step, *others)


def test_a_rollout_that_is_killed_while_cut_responses_are_continued(command, address, trained, monkeypatch):
    """No prompt is lost, and none is trained on twice."""
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesWhileItContinues)
    ended = command(*RUN, *PARTIAL, *APART, f"cluster.address={address}", "runner.max_steps=4")
    assert ended.code == 0, ended.err
    assert Path("killed").exists()
    assert metrics("runtime/restarts") == [0, 0, 1, 1]
    assert metrics("perf/samples") == [8] * 4
    assert metrics("partial_rollout/open_prompts")[-1] == 0
    assert max(metrics("partial_rollout/continued_frac")) > 0
    counts = Counter(one.prompt.index for one in trained)
    assert set(counts.values()) == {1}
    assert len(counts) == 4 * 8
    assert all(one.complete and one.valid for one in trained)


class DyingEnvironment(Environment):
    """Killed in every construction."""

    def __init__(self, *given: Any, **named: Any) -> None:
        with open("deaths", "a") as deaths:
            deaths.write("x")
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_environment_that_is_killed_at_every_start(command, address, monkeypatch):
    monkeypatch.setattr(embodied, "Environment", DyingEnvironment)
    placement = "cluster.component_placement={'actor_critic,rollout': 0, env: 1}"
    settings = ["embodied.yaml", "runner.output_dir=out", "cluster.devices_per_node=2", placement]
    ended = command(*settings, f"cluster.address={address}", "cluster.restarts=1")
    assert ended.code == 75, ended.err
    assert Path("deaths").read_text() == "xx"
    assert "env[0] was started again 1 times (cluster.restarts)" in ended.err


STOPS_ITSELF = """
import os, signal
from pathlib import Path
from rl_platform.components.environment import Environment
from rl_platform.launch.cli import main
from rl_platform.runners import embodied
from rl_platform.runners.watching import hang_watch
from rl_platform import runtime

class StopsItself(Environment):
    def collect(self, step, *others):
        progress, mark = self.context.progress, Path(f"stopped in {step}")
        original = progress.update

        def update(done, total, unit):
            original(done, total, unit)
            if done == total // 2 and step in (1, 2) and not mark.exists():
                mark.write_text(f"{os.getpid()}.")
                os.kill(os.getpid(), signal.SIGSTOP)

        progress.update = update
        try:
            return super().collect(step, *others)
        finally:
            del progress.update

hang_watch.PATIENCE_S = 6.0  # slow cores need 2 s for a call
runtime.SHUTDOWN_S = 1.0  # a stopped process never ends by itself
embodied.Environment = StopsItself
main()
"""


def test_a_worker_that_is_stopped_below_and_beyond_the_deadline(start, folder):
    """Its process stops itself in the middle of the second rollout, and of the third. Below the deadline nothing is
    lost, and the stacks of both sides are written; beyond it the run names them and ends. The run has a Ray of its own.
    Slow cores make the first stop long, so the deadline is long, too; until it passes, nothing computes.
    """
    placement = "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}"
    settings = "embodied.yaml", "runner.save_interval=1", "cluster.devices_per_node=2", placement
    stacks = Path("out/stacks.txt")
    run = start(*settings, "runner.max_steps=3", f"runner.deadline_s={STOPPED_S}", code=STOPS_ITSELF)

    def stopped(step: int) -> int:
        """Returns the process of the environments once it has stopped in this step."""
        mark = Path(f"stopped in {step}")
        run.until(lambda: mark.exists() and mark.read_text().endswith("."))
        return int(mark.read_text().rstrip("."))

    pid = stopped(1)
    run.until(lambda: stacks.exists() and f"process {pid} did not answer within 3 s" in stacks.read_text())
    assert run.poll() is None, run.communicate()[1]
    assert re.search(r"nothing has moved for \d+ s: the runner waits, ", stacks.read_text())
    assert "--- runner" in stacks.read_text()
    psutil.Process(pid).resume()
    assert stopped(2) == pid, "it was unharmed"

    _, errors = run.communicate(timeout=4 * HANG_S)
    assert run.returncode == 75, errors
    assert re.search(f"Deadline: runner waited {STOPPED_S} s (for|on channel) ", errors), errors
    assert re.search(r"env\[0\] (busy in collect for|silent since the call of collect) ", errors), errors
    assert "the same command goes on from step 2" in errors
    assert [row["step"] for row in read_metrics("out")] == [0, 1, 2]
    until(lambda: not psutil.pid_exists(pid))


class OutgrowsItsMemory(EmbodiedActor):
    """Once, in the second step, its process may take 64 MB more and needs a gigabyte."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if step == 1 and not Path("limited").exists():
            Path("limited").touch()
            taken, before = psutil.Process().memory_info().vms, resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, before[1]))
            try:
                torch.ones(2**28)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
        return super().update(batch, step)


def test_a_worker_without_memory_ends_the_run_with_the_cause(command, address, monkeypatch, folder):
    placement = "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}"
    settings = ["embodied.yaml", "runner.max_steps=3", "runner.save_interval=1", "runner.output_dir=out"]
    assert command(*settings).code == 0
    expected = learned(STEPS, "actor")
    shutil.rmtree("out")
    monkeypatch.setattr(embodied, "EmbodiedActor", OutgrowsItsMemory)
    run = partial(command, *settings, "cluster.devices_per_node=2", placement, f"cluster.address={address}")
    ended = run()
    assert Path("limited").exists()
    assert ended.code == 70, ended.err
    assert "WorkerError: actor_critic[0].update raised RuntimeError" in ended.err
    assert "can't allocate memory" in ended.err
    assert "the same command goes on from step 1" in ended.err
    assert run().code == 0
    assert equal(learned(STEPS, "actor"), expected)


class SpoilsItsRows(LanguageActor):
    """From the second step on, the rows of rank 1 give a gradient that is not finite."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if step >= 1 and self.context.rank == 1:
            batch = replace(batch, advantages=batch.advantages * float("nan"))
        return super().update(batch, step)


def test_gradients_of_one_rank_are_not_finite_until_the_run_is_stopped(command, address, monkeypatch, folder):
    """Two optimizer steps are left out by both ranks; the third in a row ends the run."""
    monkeypatch.setattr(reasoning, "LanguageActor", SpoilsItsRows)
    two_steps = "algorithm.ppo_epochs=1", "data.mini_batch_size=4"
    ended = command(*RUN, *TWO_LEARNERS, *two_steps, f"cluster.address={address}")
    assert ended.code == 70, ended.err
    assert "Diverged: actor[" in ended.err
    assert "3 optimizer steps in a row had a non-finite gradient" in ended.err
    assert metrics("actor/skipped_updates") == [0, 2]
    before, after = learned(1, "actor")["actor"], learned(2, "actor")["actor"]
    assert (int(before.pop("failures")), int(after.pop("failures"))) == (0, 2)
    assert equal(after, before)
    assert not equal(learned(2, "critic"), learned(1, "critic"))
    assert list(Path("out/failures").glob("*-actor-0.pt"))
