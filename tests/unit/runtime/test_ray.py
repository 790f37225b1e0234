"""The Ray runtime: processes, calls, channels and weights between them, failures, reservation, shutdown."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from forks import Job
from stand_ins import Placed
from waiting import HANG_S, drained, until

from rl_platform.errors import ChannelClosed, DataError, Deadline, PlacementError, WorkerDied, WorkerError
from rl_platform.records import Weights
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.host import ComponentContext
from rl_platform.runtime.ray import runtime as ray_runtime
from rl_platform.runtime.ray.actors import RayActors
from rl_platform.runtime.ray.fingerprint import code_fingerprint
from rl_platform.runtime.ray.unix_socket import FetchThroughRay, SocketAnswer
from rl_platform.runtime.weights_token import merge_published

pytestmark = pytest.mark.usefixtures("ray_cluster")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Worker:
    """A component that does what the test asks for."""

    def __init__(self, context: ComponentContext, broken: str = "") -> None:
        self.context = context
        self.seen: list[Any] = []
        self.weights: Weights | None = None
        if context.label == broken:
            raise OSError("no such model")
        if f"slow {context.label}" == broken:
            time.sleep(60)
        context.shared.setdefault("built", []).append(context.label)

    def about(self) -> tuple[int, list[str], ComponentContext, str | None]:
        return os.getpid(), self.context.shared["built"], self.context, os.environ.get("CUDA_VISIBLE_DEVICES")

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def noted(self) -> list[Any]:
        return self.seen

    def echo(self, value: Any) -> Any:
        return value

    def lock(self) -> Any:
        return threading.Lock()

    def warn(self) -> None:
        logging.getLogger("rl_platform.test").warning("the disk is nearly full")

    def fail(self, error: BaseException) -> None:
        raise error

    def sleep(self, seconds: float) -> None:
        for index in range(int(seconds * 20)):
            self.context.progress.update(index, int(seconds * 20), "naps")
            time.sleep(0.05)

    def hang(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self, pause: float = 0.0) -> None:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGKILL)

    def produce(self, channel: Any, items: list[Any]) -> None:
        channel.put_many(items)

    def trickle(self, channel: Any, count: int) -> None:
        for number in range(count):
            channel.put(number)

    def wait_and_put(self, channel: Any, closed: Any) -> None:
        channel.put(0)  # tells of the room
        closed.get()
        channel.put(1)

    def wait_and_put_twice(self, channels: Sequence[Any], closed: Any, error: Exception | None) -> None:
        self.seen = [*channels]  # so that what failed outlives the call
        for channel in channels:
            channel.put(0)  # tells of the room
        closed.get()
        for channel in channels:
            channel.put(1)
        if error is not None:
            raise error

    def consume(self, channel: Any) -> list[Any]:
        return drained(channel)

    def sum_and_ownership(self, channel: Any) -> tuple[float, bool]:
        array = channel.get()
        return float(array.sum()), array.flags.owndata or array.flags.writeable

    def publish(self, version: int) -> Weights:
        self.weights = self.weights or Weights(version, {"w": torch.zeros(5000)})
        self.weights = Weights(version, self.weights.state)
        self.weights.state["w"] += 1
        return self.weights

    def receive(self, weights: Weights) -> tuple[int, float, bool]:
        """Version, value, and whether the tensor is one that a neighbour owns."""
        value = weights.state["w"]
        value += 0  # it may be written to
        neighbours = self.context.shared.setdefault("tensors", [])
        same = any(value is other for other in neighbours)
        neighbours.append(value)
        return weights.version, float(value[-1]), same

    def reduce(self) -> float:
        import torch.distributed as dist

        tensor = torch.tensor([float(self.context.rank + 1)])
        dist.all_reduce(tensor)
        return float(tensor)

    def reduce_after(self, seconds: float) -> None:
        import torch.distributed as dist

        time.sleep(seconds)
        dist.all_reduce(torch.ones(1))


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """start([("actor", 0)], ...): a runtime on these hosts and its groups; shut down at the end."""
    from rl_platform.runtime.ray.runtime import RayRuntime

    started: list[Any] = []

    def run(
        *hosts: list[tuple[str, int]],
        deadline_s: float = HANG_S,
        broken: str = "",
        restarts: int = 0,
        start_timeout_s: float = 2 * HANG_S,
        **options: Any,
    ) -> Any:
        placement = Placed.of(*hosts, **options)
        runtime = RayRuntime(placement, deadline_s, 7, restarts=restarts, start_timeout_s=start_timeout_s)
        started.append(runtime)
        names = dict.fromkeys(name for members in hosts for name, _ in members)
        return runtime, runtime.start({name: ComponentSpec(Worker, {"broken": broken}) for name in names})

    yield run
    for runtime in started:
        with suppress(Deadline):
            runtime.shutdown(1.0)


PAIR = [("actor", 0), ("critic", 0)], [("rollout", 0)]


@pytest.fixture(scope="module", params=["by sockets", "through Ray"])
def pair(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A runtime on the hosts of `PAIR` and its groups, for tests that leave it as it was; the runner's calls travel as
    on one node, or as to other nodes."""
    from rl_platform.runtime.ray.runtime import RayRuntime

    with RayRuntime(Placed.of(*PAIR), HANG_S, 7) as runtime:
        if request.param == "through Ray":
            runtime._actors.transport._clients.update(host0=None, host1=None)
        groups = runtime.start({name: ComponentSpec(Worker) for name in ("actor", "critic", "rollout")})
        yield runtime, groups
        assert has_socket(runtime, "host1") == (request.param == "by sockets")


def has_socket(runtime: Any, host: str) -> bool:
    """Whether calls to this host have travelled through a socket."""
    return runtime._actors.transport._clients.get(host) is not None


def sockets(runtime: Any) -> list[str]:
    return [
        line for line in Path("/proc/net/unix").read_text().splitlines() if runtime._actors.transport.namespace in line
    ]


def test_components_of_a_host_share_a_process_and_calls_keep_their_order(pair):
    _, groups = pair
    (actor,), (critic,), (rollout,) = (groups[name].about().wait() for name in ("actor", "critic", "rollout"))
    assert actor[0] == critic[0] != rollout[0] != os.getpid()
    assert actor[1] == ["actor[0]", "critic[0]"]
    assert (rollout[2].label, rollout[2].world_size, rollout[2].seed) == ("rollout[0]", 1, 7)
    for number in range(200):
        groups["rollout"].note(number)
    assert groups["rollout"].noted().wait()[0] == list(range(200))
    calls, seconds = groups["rollout"].timings()["note"]
    assert calls == 200
    assert seconds > 0


def test_small_and_large_calls_keep_their_order_though_they_travel_by_two_ways(pair):
    _, groups = pair
    before = len(groups["rollout"].noted().wait()[0])
    values = [number if number % 3 else np.full(50_000, number) for number in range(30)]
    for value in values:
        groups["rollout"].note(value)
    noted = groups["rollout"].noted().wait()[0][before:]
    assert [int(np.max(value)) for value in noted] == list(range(30))


def test_large_arguments_and_results_arrive_whole_and_may_be_written_to(pair):
    _, groups = pair
    tensor, array = torch.randn(300, 1000), np.arange(100_000)
    tied = {"a": tensor, "b": tensor, "row": tensor[3], "half": tensor.to(torch.bfloat16), "none": torch.empty(0, 2)}
    for echoed, again in groups["rollout"].echo((tied, array)).wait():
        assert all(torch.equal(echoed[name], value) for name, value in tied.items())
        assert echoed["a"].data_ptr() == echoed["b"].data_ptr()
        assert [value.dtype for value in echoed.values()] == [value.dtype for value in tied.values()]
        assert np.array_equal(again, array)
        echoed["a"] += 1
        again += 1


def test_errors_come_back_typed_with_the_remote_traceback(pair):
    _, groups = pair
    with pytest.raises(DataError, match="no line 7") as typed:
        groups["actor"].fail(DataError("no line 7")).wait()
    assert typed.value.__notes__ == ["raised in actor[0].fail"]
    raised = r"rollout\[0\].fail raised OSError: disk full\nRemote traceback:\n(.|\n)*in fail"
    with pytest.raises(WorkerError, match=raised):
        groups["rollout"].fail(OSError("disk full")).wait()
    with pytest.raises(WorkerError, match="cannot pickle"):
        groups["rollout"].lock().wait()
    with pytest.raises(TypeError, match="cannot pickle"):
        groups["rollout"].echo(threading.Lock())
    assert groups["rollout"].echo("works still").wait() == ["works still"]


def test_who_does_not_start_in_time_is_named_before_and_at_the_deadline(start, monkeypatch, caplog):
    monkeypatch.setattr(ray_runtime, "STARTING_S", 0.5)
    monkeypatch.setattr("rl_platform.runtime.SHUTDOWN_S", 0.5)  # its constructor ends long after the runtime
    build = ray_runtime.RayRuntime._build

    def impatient(self: Any, hosts: Any) -> None:  # the processes are there
        self._start_timeout_s = 2.0
        build(self, hosts)

    monkeypatch.setattr(ray_runtime.RayRuntime, "_build", impatient)
    with pytest.raises(Deadline, match=r"rollout\[0\] did not start within 2 s \(cluster.start_timeout_s\)"):
        start(*PAIR, broken="slow rollout[0]")
    assert "rollout[0]: starting for 1 s, in " in caplog.text


def test_a_constructor_that_fails_ends_everything(start):
    def hosts() -> set[psutil.Process]:
        actors = set()
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                actors |= {child} if "HostActor" in child.name() else set()
        return actors

    before = hosts()
    with pytest.raises(WorkerError, match=r"rollout\[0\].__init__ raised OSError: no such model"):
        start(*PAIR, broken="rollout[0]")
    until(lambda: not hosts() - before)


def test_items_travel_between_processes_and_large_ones_without_a_copy(pair):
    runtime, groups = pair
    stream = runtime.channel("stream", 4, ["actor"], ["rollout"])
    consuming = groups["rollout"].consume(stream)
    groups["actor"].produce(stream, list(range(50))).wait()
    stream.close()
    assert consuming.wait()[0] == list(range(50))
    large = runtime.channel("stream", 4, ["runner"], ["rollout"])
    large.put(np.ones(1_000_000))
    total, own = groups["rollout"].sum_and_ownership(large).wait()[0]
    assert total == 1_000_000
    assert not own, "the array should lie in the object store"
    with pytest.raises(ValueError, match="is open"):
        runtime.channel("stream", 4)


def test_when_a_call_ends_all_that_it_put_is_in_the_channel(pair):
    runtime, groups = pair
    stream = runtime.channel("trickled", 1000, ["actor"], ["rollout"])
    groups["actor"].trickle(stream, 400).wait()
    assert stream.get_many(1000) == list(range(400))
    closed = runtime.channel("closed", 2, ["runner"], ["actor"])
    putting = groups["actor"].wait_and_put(stream, closed)
    assert stream.get() == 0
    stream.close()
    closed.put(None)
    with pytest.raises(ChannelClosed, match="put on channel 'trickled', which is closed"):
        putting.wait()
    closed.close()


@pytest.mark.parametrize("error", [None, DataError("bad data")], ids=["by its items", "itself"])
def test_errors_of_items_are_those_of_the_call_that_put_them(pair, error: Exception | None):
    """The next call of the rank failed with the error of the second channel."""
    runtime, groups = pair
    streams = [runtime.channel(f"stream {number}", 100, ["rollout"], ["actor"]) for number in range(2)]
    closed = runtime.channel("closed", 2, ["runner"], ["rollout"])
    putting = groups["rollout"].wait_and_put_twice(streams, closed, error)
    for stream in streams:
        assert stream.get() == 0
        stream.close()
    closed.put(None)
    with pytest.raises(ChannelClosed if error is None else DataError):
        putting.wait()
    assert groups["rollout"].echo(1).wait() == [1]
    assert groups["rollout"].echo(2).wait() == [2]


def test_a_missed_deadline_says_what_the_other_processes_do(pair):
    runtime, groups = pair
    channel = runtime.channel("deadline", 4, ["rollout"], ["actor"])
    gate = runtime.channel("gate", 4, ["runner"], ["rollout"])
    held = groups["rollout"].consume(gate)
    waiting = groups["actor"].consume(channel)
    for name in ("rollout", "actor"):
        until(lambda worker=groups[name]._workers[0]: "waiting on" in worker.doing())
    waited = r"runner waited 0.2 s on channel 'deadline' \(depth 0, producers: rollout\[0\] busy in consume"
    with pytest.raises(Deadline, match=waited):
        channel.get(timeout=0.2)
    unfinished = r"1 of 1 ranks unfinished: actor\[0\] busy in consume for .* waiting on channel"
    with pytest.raises(Deadline, match=unfinished):
        waiting.wait(0.2)
    gate.close()
    channel.close()
    assert [*held.wait(), *waiting.wait()] == [[], []]


def test_a_failed_call_closes_the_channels_of_its_rank_everywhere(pair):
    runtime, groups = pair
    channel = runtime.channel("failing", 4, ["rollout"], ["actor"])
    consuming = groups["actor"].consume(channel)
    with pytest.raises(DataError):
        groups["rollout"].fail(DataError("bad data")).wait()
    with pytest.raises(DataError, match="bad data"):
        consuming.wait(HANG_S)


def test_weights_are_those_of_the_learners_rank_in_the_process_or_a_verified_copy(start):
    _, groups = start([("actor", 0)], [("actor", 1), ("critic", 0)], [("rollout", 0)])
    first = merge_published(groups["actor"].publish(1).wait())
    assert groups["rollout"].receive(first).wait() == [(1, 1.0, False)]
    assert groups["critic"].receive(first).wait() == [(1, 1.0, False)]
    assert groups["critic"].receive(first).wait() == [(1, 1.0, True)], "the tensor that it has received already"
    second = merge_published(groups["actor"].publish(2).wait())
    assert groups["rollout"].receive(second).wait() == [(2, 2.0, False)]
    assert groups["critic"].receive(second).wait() == [(2, 2.0, True)]
    with pytest.raises(WorkerError, match=r"weights version 1 of actor\[0\] were replaced"):
        groups["rollout"].receive(first).wait()


def test_a_dead_process_is_noticed_in_a_call_or_without_one_and_closes_its_channels(start):
    runtime, groups = start([("actor", 0)], [("rollout", 0)], [("rollout", 1)])
    pid = groups["rollout"].about().wait()[1][0]
    for ending, host in ((lambda: os.kill(pid, signal.SIGKILL), "host2"), (groups["rollout"].rank(0).die, "host1")):
        channel = runtime.channel(f"answers of {host}", 4, ["rollout"], ["actor"])
        consuming = groups["actor"].consume(channel)
        dying = ending()
        with pytest.raises(WorkerDied, match=f"the process of {host} died"):
            consuming.wait(HANG_S)
    with pytest.raises(WorkerDied, match="the process of host1 died"):
        dying.wait(HANG_S)
    for rank in (0, 1):
        with pytest.raises(WorkerDied):
            groups["rollout"].rank(rank).echo(1).wait()
    assert groups["actor"].echo("lives").wait() == ["lives"]


@pytest.mark.parametrize("reported", ["idle", "busy in about for 0.002 s"])
def test_a_process_that_stops_before_it_reports_a_call_is_not_in_an_earlier_state(start, reported):
    _, groups = start([("actor", 0)], [("rollout", 0)])
    process = psutil.Process(groups["rollout"].about().wait()[0][0])
    worker = groups["rollout"]._workers[0]
    until(lambda: worker.doing() == "idle")
    process.suspend()
    time.sleep(0.5)  # the last report of the process has arrived
    try:
        worker._host._states[worker.label] = reported, worker.progress()
        called = groups["rollout"].echo(1)
        until(lambda: worker.doing().startswith("silent since the call of echo "))
    finally:
        process.resume()
    assert called.wait(HANG_S) == [1]
    until(lambda: worker.doing() == "idle")


def test_a_line_that_breaks_between_living_processes_fails_the_call_and_nobody_waits(start):
    runtime, groups = start([("actor", 0)])
    waiting = groups["actor"].consume(runtime.channel("never", 4, ["runner"], ["actor"]))
    broken = socket.socket(fileno=os.dup(runtime._actors.transport._clients["host0"]._connection.fileno()))
    broken.shutdown(socket.SHUT_RDWR)
    with pytest.raises(WorkerDied, match="the process is alive, but its connection to another process broke"):
        waiting.wait(HANG_S)
    broken.close()


def test_learners_with_several_ranks_have_a_process_group_whose_first_death_is_reported(start):
    _, groups = start([("actor", 0)], [("actor", 1)])
    assert groups["actor"].reduce().wait() == [3.0, 3.0]
    surviving = groups["actor"].rank(0).reduce_after(0.0)
    dying = groups["actor"].rank(1).die(0.3)
    with pytest.raises(WorkerDied, match="host1"):
        surviving.wait(HANG_S)
    with pytest.raises(WorkerDied):
        dying.wait(HANG_S)


def test_a_process_without_a_learner_is_started_again_and_a_learner_ends_everything(start):
    runtime, groups = start([("actor", 0)], [("rollout", 0)], [("reward", 0)], restarts=1)
    assert [runtime.restartable(name) for name in ("actor", "rollout")] == [False, True]
    published = groups["actor"].publish(1).wait()[0]
    pid = groups["rollout"].about().wait()[0][0]
    groups["rollout"].note("lost").wait()
    with_it = runtime.channel("with it", 4, ["runner"], ["rollout"])
    handle, settled = groups["rollout"].die(), []
    with pytest.raises(WorkerDied) as died:
        handle.wait()
    handle.settle()
    assert runtime.restart(died.value, lambda: settled.append(runtime.restarts)) == [("rollout", 0)]
    assert (settled, runtime.restarts, runtime.restartable("rollout")) == ([0], 1, False)
    assert groups["rollout"].noted().wait() == [[]]
    assert groups["rollout"].about().wait()[0][0] != pid
    assert has_socket(runtime, "host1 (restart 1)")
    assert groups["rollout"].receive(published).wait() == [(1, 1.0, False)]
    with pytest.raises(WorkerDied):
        with_it.put("into a queue that is gone")
    fresh = runtime.channel("with it", 4, ["runner"], ["rollout"])
    fresh.put("found")
    fresh.close()
    assert groups["rollout"].consume(fresh).wait() == [["found"]]

    between = runtime.channel("between", 4, ["rollout"], ["reward"])
    consuming = groups["reward"].consume(between)
    with pytest.raises(WorkerDied, match="host0") as died:
        groups["actor"].die().wait()
    with pytest.raises(WorkerDied, match="host0"):
        consuming.wait(HANG_S)  # nobody of it died, but there is nothing to go on for
    with pytest.raises(WorkerDied, match="host0"):
        runtime.restart(died.value, settled.clear)
    assert settled == [0]


def test_a_learner_that_dies_while_another_process_starts_again_ends_everything(start, monkeypatch):
    """The other process may be on a node that is gone, and would be awaited for half an hour."""
    runtime, groups = start([("actor", 0)], [("rollout", 0)], restarts=1)
    learner = psutil.Process(groups["actor"].about().wait()[0][0])
    launch = RayActors.launch

    def never(self: RayActors, host: str, name: str) -> Any:
        launch(self, host, name)
        learner.kill()
        return lambda *_: Future()

    monkeypatch.setattr(RayActors, "launch", never)
    with pytest.raises(WorkerDied) as died:
        groups["rollout"].die().wait()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="host0"):
        runtime.restart(died.value, lambda: None)
    assert time.monotonic() - began < HANG_S


def test_an_interrupt_does_not_wait_for_a_process_that_starts_again(start, monkeypatch):
    runtime, groups = start([("actor", 0)], [("rollout", 0)], restarts=1)
    launch = RayActors.launch

    def never(self: RayActors, host: str, name: str) -> Any:
        launch(self, host, name)
        threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        return lambda *_: Future()

    monkeypatch.setattr(RayActors, "launch", never)
    with pytest.raises(WorkerDied) as died:
        groups["rollout"].die().wait()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runtime.restart(died.value, lambda: None)
    assert time.monotonic() - began < HANG_S


def test_a_process_that_is_replaced_alive_is_ended(start):
    """Its connection broke; it would keep its memory, and its accelerators, until the end of the run."""
    runtime, groups = start([("actor", 0)], [("rollout", 0)], restarts=1)
    pid = groups["rollout"].about().wait()[0][0]
    waiting = groups["rollout"].consume(runtime.channel("never", 4, ["runner"], ["rollout"]))
    broken = socket.socket(fileno=os.dup(runtime._actors.transport._clients["host1"]._connection.fileno()))
    broken.shutdown(socket.SHUT_RDWR)
    broken.close()
    with pytest.raises(WorkerDied, match="the process is alive") as died:
        waiting.wait(HANG_S)
    assert psutil.pid_exists(pid)
    assert runtime.restart(died.value, lambda: None) == [("rollout", 0)]
    until(lambda: not psutil.pid_exists(pid))
    assert groups["rollout"].echo("again").wait() == ["again"]


def test_warnings_of_a_process_are_heard_by_the_runner(pair, caplog):
    _, groups = pair
    groups["rollout"].warn().wait()
    until(lambda: "the disk is nearly full" in caplog.text)


def test_progress_is_heard_and_moves_the_deadline(pair):
    _, groups = pair
    heard: list[tuple[int, int, str]] = []
    groups["actor"].sleep(5.0).wait(4.0, on_progress=lambda *progress: heard.append(progress))
    assert heard
    assert heard[-1][1:] == (100, "naps")


def test_a_process_sees_the_accelerators_that_ray_gave_the_run_and_the_variables_of_its_nodes(start):
    _, groups = start([("actor", 0)], accelerators=(2, 3), env={"CUDA_VISIBLE_DEVICES": "2,3", "RL_MARK": "here"})
    _, _, context, visible = groups["actor"].about().wait()[0]
    assert context.accelerators == (0, 1)  # as the process numbers what it sees
    assert visible == "0,1"
    assert groups["actor"].variable("RL_MARK").wait() == ["here"]


def test_a_process_that_runs_other_code_is_refused_and_both_are_named(start, monkeypatch):
    theirs = code_fingerprint()
    monkeypatch.setattr(ray_runtime, "code_fingerprint", lambda: "rl-platform 0.0 (another)")
    with pytest.raises(PlacementError, match=r"host0 at [\d.:a-f]+ runs other code") as refused:
        start([("actor", 0)])
    (problem,) = refused.value.problems
    assert (problem.key, problem.value, problem.allowed) == ("cluster.address", theirs, "rl-platform 0.0 (another)")


def test_machines_that_others_reach_by_the_loopback_interface_only_are_refused(start, monkeypatch):
    call = ray_runtime.RayRuntime._all

    def on_other_machines(self: Any, method: str, arguments: Any) -> Any:
        """The processes of this machine report two, with addresses of the loopback interface."""
        found = call(self, method, arguments)
        if method != "greet":
            return found
        return {name: replace(info, machine=name, address="127.0.1.1") for name, info in found.items()}

    monkeypatch.setattr(ray_runtime.RayRuntime, "_all", on_other_machines)
    with pytest.raises(PlacementError, match="other machines cannot reach host1 on host1") as refused:
        start([("actor", 0)], [("rollout", 0)])
    assert [problem.value for problem in refused.value.problems] == ["127.0.1.1"] * 2


def test_a_placement_that_the_cluster_cannot_hold_is_refused_at_once(start):
    with pytest.raises(PlacementError, match="needs 1 node with 9 GPUs, but the Ray cluster has 1 node with 4 GPUs"):
        start([("actor", 0)], accelerators=tuple(range(9)))  # at the deadline it would be another error


def test_resources_that_another_run_holds_are_waited_for_until_the_deadline(start):
    start([("actor", 0)], accelerators=(0, 1, 2))
    with pytest.raises(Deadline, match="needs 1 node with 2 GPUs, which others still hold after 1 s: 1 GPUs"):
        start([("actor", 0)], accelerators=(0, 1), deadline_s=1.0)


def test_two_runs_on_one_cluster_do_not_meet(start):
    (one, first), (two, second) = start([("actor", 0)]), start([("actor", 0)])
    channels = [runtime.channel("of one name", 4, ["runner"], ["actor"]) for runtime in (one, two)]
    for channel, item in zip(channels, ("first", "second"), strict=True):
        channel.put(item)
        channel.close()
    assert second["actor"].consume(channels[1]).wait() == [["second"]]
    assert first["actor"].consume(channels[0]).wait() == [["first"]]
    first["actor"].note(1).wait()
    assert second["actor"].noted().wait() == [[]]
    assert first["actor"].about().wait()[0][0] != second["actor"].about().wait()[0][0]


def test_shutdown_ends_every_process_and_names_the_busy_rank(start):
    runtime, groups = start(*PAIR)
    pids = [groups[name].about().wait()[0][0] for name in ("actor", "rollout")]
    hanging = groups["rollout"].hang(60)
    assert sockets(runtime)
    channel = runtime.channel("left", 4, ["actor"])
    until(lambda: "busy in hang" in groups["rollout"]._workers[0].doing())  # a call that has not begun is refused
    with pytest.raises(Deadline, match=r"rollout\[0\] did not stop in time"):
        runtime.shutdown(1.0)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    until(lambda: not sockets(runtime))
    with pytest.raises(WorkerDied):
        hanging.wait(HANG_S)
    with pytest.raises((WorkerDied, ChannelClosed)):
        channel.put(1)
    runtime.shutdown()


def test_after_the_end_of_a_run_its_threads_call_ray_no_more(start):
    """A connection may break after `ray.shutdown`. A call of Ray would end the process then, without any message."""
    runtime, _ = start([("actor", 0)])
    transport, answers, broken = runtime._actors.transport, list[Any](), Future[SocketAnswer]()
    runtime.shutdown()
    transport.send("host0", None, "pulse", (), answers.append)
    broken.set_result(FetchThroughRay(None))
    transport._arrived("host0", None, answers.append, broken)
    assert [str(answer.exception()) for answer in answers] == ["the process of host0 was ended"] * 2


def test_a_worker_of_these_tests_that_is_killed_while_it_starts_costs_no_other_worker(ray_forks, tmp_path: Path):
    """Ray kills workers that it no longer needs, also while they ask for a fork."""
    done = tmp_path / "done"
    job = Job(code=f"open({str(done)!r}, 'w').close()", arguments=[""], environment={}, folder=str(tmp_path))
    asked = json.dumps({**job, "numbers": [0, 1, 2]}).encode()
    for sent in (b"", asked[:20], asked):
        with socket.socket(socket.AF_UNIX) as connection, open(os.devnull, "r+") as nothing:
            connection.connect(ray_forks.path)
            if sent:
                socket.send_fds(connection, [b"\n"], [nothing.fileno()] * 3)
                connection.sendall(sent)
    until(done.exists)
