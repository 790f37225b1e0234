"""The local runtime: construction, calls, failures, deadlines, shutdown."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from stand_ins import Placed, placed_host
from waiting import HANG_S, drained, until

from rl_platform.errors import (
    ChannelClosed,
    CheckpointError,
    ConfigError,
    DataError,
    Deadline,
    PlacementError,
    Problem,
    WorkerDied,
    WorkerError,
)
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.host import ComponentContext
from rl_platform.runtime.lifecycle import in_stages
from rl_platform.runtime.local import LocalRuntime


def runtime(*hosts: list[tuple[str, int]], deadline_s: float = HANG_S) -> LocalRuntime:
    return LocalRuntime(Placed.of(*hosts), deadline_s=deadline_s, seed=7)


class Worker:
    """A component that does what the test asks for."""

    def __init__(self, context: ComponentContext, log: list[str] | None = None, broken: str = "") -> None:
        self.context = context
        self.log = log if log is not None else []
        self.thread = threading.current_thread().name
        if context.label == broken:
            raise OSError("no such model")
        self.log.append(f"new {context.label}")
        context.shared.setdefault("built", []).append(context.label)

    def about(self) -> tuple[ComponentContext, str, str]:
        return self.context, self.thread, threading.current_thread().name

    def echo(self, value: Any, pause: float = 0.0) -> tuple[int, Any]:
        time.sleep(pause)
        self.log.append(f"{self.context.label} {value}")
        return self.context.rank, value

    def fail(self, error: BaseException, rank: int | None = None, otherwise: threading.Event | None = None) -> None:
        if rank in (None, self.context.rank):
            raise error
        assert otherwise is not None
        self.hold(otherwise)

    def hold(self, event: threading.Event) -> None:
        self.log.append("holding")
        assert event.wait(HANG_S)

    def produce(self, channel: Any, items: list[Any], error: BaseException | None = None) -> None:
        channel.put_many(items)
        if error is not None:
            raise error

    def consume(self, channel: Any) -> list[Any]:
        self.log.append("consuming")
        return drained(channel)

    def close(self) -> None:
        self.log.append(f"close {self.context.label}")


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


class Unclosable(Worker):
    def close(self) -> None:
        raise OSError("disk full")


class Late:
    """Its construction ends after that of `Setting`."""

    def __init__(self, context: ComponentContext, event: threading.Event) -> None:
        assert event.wait(HANG_S)


class SlowWorker(Worker):
    """A worker whose constructor waits for the event."""

    def __init__(self, context: ComponentContext, log: list[str], event: threading.Event) -> None:
        log.append("constructing")
        assert event.wait(HANG_S)
        super().__init__(context, log)


class Setting:
    def __init__(self, context: ComponentContext, event: threading.Event) -> None:
        event.set()


class Clashing:
    def rank(self) -> int:
        return 0


def specs(*names: str, cls: type = Worker, **kwargs: Any) -> dict[str, ComponentSpec]:
    return {name: ComponentSpec(cls, kwargs) for name in names}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


def test_others_are_constructed_while_one_waits_for_its_processes():
    options = {"event": threading.Event()}
    with runtime([("reward", 0), ("actor", 0)]) as local:
        local.start({"reward": ComponentSpec(Late, options, beside=True), "actor": ComponentSpec(Setting, options)})


@pytest.mark.parametrize(
    ("hosts", "stages"),
    [
        (
            [(0, (0,), "rollout actor"), (0, (1,), "rollout actor")],
            [{0: "actor", 1: "actor"}, {0: "rollout", 1: "rollout"}],
        ),
        # a rollout and a reward in processes of their own, on the learner's GPU and on another one
        (
            [(0, (0, 1), "critic"), (0, (1,), "rollout"), (0, (2,), "rollout"), (1, (0,), "reward")],
            [{0: "critic", 2: "rollout", 3: "reward"}, {1: "rollout"}],
        ),
        ([(0, (), "rollout actor"), (0, (), "reward")], [{0: "rollout actor", 1: "reward"}]),
    ],
)
def test_learners_are_constructed_before_those_that_divide_the_memory_of_their_gpus(hosts, stages):
    placed = [
        placed_host(f"host{index}", tuple((name, index) for name in names.split()), node, gpus)
        for index, (node, gpus, names) in enumerate(hosts)
    ]
    expected = [
        {f"host{index}": [(name, index) for name in names.split()] for index, names in stage.items()}
        for stage in stages
    ]
    assert in_stages(placed) == expected


def test_on_a_gpu_the_rollout_is_constructed_last():
    log: list[str] = []
    placed = Placed([placed_host("host0", (("rollout", 0), ("actor", 0)), 0, (0,))])
    with LocalRuntime(placed, deadline_s=HANG_S, seed=7) as local:
        local.start({name: ComponentSpec(Worker, {"log": log}) for name in ("rollout", "actor")})
    assert log[:2] == ["new actor[0]", "new rollout[0]"]


def test_context_tells_who_and_where_and_each_rank_has_its_thread():
    with runtime([("actor", 0), ("critic", 0)], [("actor", 1), ("critic", 1)]) as local:
        groups = local.start(specs("actor", "critic"))
        abouts = groups["actor"].about().wait() + groups["critic"].about().wait()
    for (context, constructed_in, called_in), label in zip(
        abouts, ["actor[0]", "actor[1]", "critic[0]", "critic[1]"], strict=True
    ):
        assert context.label == constructed_in == called_in == label
        assert (context.world_size, context.seed, context.accelerators) == (2, 7, ())
    shared = [context.shared for context, _, _ in abouts]
    assert shared[0] is shared[2]
    assert shared[1] is shared[3]
    assert [part["built"] for part in shared[:2]] == [["actor[0]", "critic[0]"], ["actor[1]", "critic[1]"]]


def test_calls_of_a_rank_run_in_order_and_components_side_by_side():
    log: list[str] = []
    release = threading.Event()
    with runtime([("rollout", 0), ("reward", 0)]) as local:
        groups = local.start(specs("rollout", "reward", log=log))
        groups["rollout"].hold(release)
        slow = [groups["rollout"].echo(index) for index in range(3)]
        until(lambda: "holding" in log)
        assert groups["reward"].echo("scored").wait() == [(0, "scored")]
        assert not any(handle.done() for handle in slow)
        release.set()
        assert [handle.wait() for handle in slow] == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert log[2:7] == ["holding", "reward[0] scored", "rollout[0] 0", "rollout[0] 1", "rollout[0] 2"]


def test_partial_calls():
    with runtime([("actor", rank) for rank in range(3)]) as local:
        actor = local.start(specs("actor"))["actor"]
        assert actor.world_size == 3
        assert actor.echo("x").wait() == [(0, "x"), (1, "x"), (2, "x")]
        assert actor.on([2, 0]).echo("x").wait() == [(2, "x"), (0, "x")]
        assert actor.rank(1).echo("x").wait() == [(1, "x")]
        for wrong in ([3], [], [0, 0]):
            with pytest.raises(ValueError, match=r"not distinct ranks out of \[0, 1, 2\]"):
                actor.on(wrong)


def test_a_misspelt_method_is_named_at_once():
    with runtime([("actor", 0)]) as local:
        actor = local.start(specs("actor"))["actor"]
        with pytest.raises(
            AttributeError, match=r"component 'actor' \(Worker\) has no method 'ecko'.*did you mean 'echo'"
        ):
            actor.ecko(1)
        with pytest.raises(AttributeError, match="it has: about, close"):
            actor.zzz()
        assert not hasattr(actor, "_private")


def test_a_component_may_not_use_the_groups_names():
    with runtime([("actor", 0)]) as local, pytest.raises(TypeError, match="Clashing has methods named rank"):
        local.start({"actor": ComponentSpec(Clashing)})


def test_timings_count_calls_and_seconds_of_the_slowest_rank():
    with runtime([("actor", 0), ("actor", 1)]) as local:
        actor = local.start(specs("actor"))["actor"]
        began = time.monotonic()
        actor.echo(1).wait()
        actor.rank(1).echo(2, pause=0.05).wait()
        passed = time.monotonic() - began
        count, seconds = actor.timings()["echo"]
        assert count == 2
        assert 0.05 <= seconds <= passed


def test_an_error_comes_back_typed_with_its_traceback_and_the_rank_goes_on(caplog):
    with runtime([("critic", 0), ("critic", 1)]) as local:
        critic = local.start(specs("critic"))["critic"]
        original, ours = KeyError("returns"), DataError("line 3 has no answer")
        with pytest.raises(WorkerError) as raised:
            critic.rank(1).fail(original).wait()
        message = str(raised.value)
        assert message.startswith("critic[1].fail raised KeyError: 'returns'\n")
        assert "in fail\n    raise error" in message
        assert "host.py" not in message
        assert raised.value.__cause__ is original
        with pytest.raises(DataError) as typed:
            critic.rank(0).fail(ours).wait()
        assert typed.value is ours
        assert ours.__notes__ == ["raised in critic[0].fail"]
        with pytest.raises(WorkerError, match=r"critic\[0\].fail raised SystemExit: 3"):
            critic.rank(0).fail(SystemExit(3)).wait()
        with pytest.raises(
            WorkerError, match=r"critic\[0\].fail raised Mute: \(without text: its __str__ raised KeyErr"
        ):
            critic.rank(0).fail(Mute()).wait(HANG_S)
        assert critic.echo("alive").wait() == [(0, "alive"), (1, "alive")]
    assert "critic[1].fail raised KeyError: 'returns'" in caplog.messages


@pytest.mark.parametrize(
    "refused",
    [ConfigError([Problem("critic.model.path", "holds no weights")]), CheckpointError("step-1 cannot be read")],
)
def test_errors_that_are_shown_when_the_run_ends_are_not_logged(caplog, refused):
    with runtime([("critic", 0)]) as local:
        critic = local.start(specs("critic"))["critic"]
        with pytest.raises(type(refused)) as raised:
            critic.fail(refused).wait()
        assert raised.value is refused
        assert refused.__notes__ == ["raised in critic[0].fail"]
    assert caplog.messages == []


def test_one_failed_rank_is_reported_without_waiting_for_the_others():
    with runtime([("actor", 0), ("actor", 1)]) as local:
        actor = local.start(specs("actor"))["actor"]
        release = threading.Event()
        with pytest.raises(WorkerError, match=r"actor\[1\].fail raised ValueError"):
            actor.fail(ValueError("bad batch"), rank=1, otherwise=release).wait()
        release.set()


def test_a_missed_call_names_waiter_call_and_what_the_ranks_do():
    release = threading.Event()
    with runtime([("critic", 0), ("critic", 1)]) as local:
        critic = local.start(specs("critic"))["critic"]
        critic.rank(1).hold(release)
        late = critic.echo(1)
        critic.rank(0).echo(2).wait()  # so the other rank has done both
        with pytest.raises(
            Deadline,
            match=r"^runner waited 0.05 s for critic.echo \(1 of 2 ranks unfinished: critic\[1\] busy in hold for "
            r"[\d.]+ s with 1 more queued\), submitted at \d\d:\d\d:\d\d$",
        ):
            late.wait(timeout=0.05)
        release.set()
        assert late.wait() == [(0, 1), (1, 1)]


def test_a_missed_get_tells_what_each_producer_does_and_waits_on():
    with runtime([("rollout", 0), ("rollout", 1), ("critic", 0)]) as local:
        groups = local.start(specs("rollout", "critic"))
        prompts = local.channel("prompts", 4, producers=["runner"], consumers=["rollout"])
        rollouts = local.channel("rollouts", 4, producers=["rollout"], consumers=["critic"])
        groups["rollout"].rank(0).consume(prompts)
        until(lambda: "waiting on" in groups["rollout"]._workers[0].doing())
        with pytest.raises(
            Deadline,
            match=r"^runner waited 0.05 s on channel 'rollouts' \(depth 0, producers: rollout\[0\] busy in consume for "
            r"[\d.]+ s waiting on channel 'prompts' for [\d.]+ s, rollout\[1\] idle\), since",
        ):
            rollouts.get(timeout=0.05)


def test_the_default_deadline_is_the_runtimes():
    with runtime([("critic", 0)], deadline_s=0.05) as local:
        local.start(specs("critic"))
        with pytest.raises(Deadline, match=r"waited 0.05 s on channel 'rollouts'"):
            local.channel("rollouts", 4, producers=["critic"]).get()


def test_a_failing_producer_closes_its_channels_with_its_error():
    with runtime([("rollout", 0), ("critic", 0)]) as local:
        groups = local.start(specs("rollout", "critic"))
        rollouts = local.channel("rollouts", 4, producers=["rollout"], consumers=["critic"])
        bystander = local.channel("other", 4, producers=["runner"])
        consuming = groups["critic"].consume(rollouts)
        groups["rollout"].produce(rollouts, [1, 2], error=ValueError("engine died"))
        with pytest.raises(WorkerError, match=r"rollout\[0\].produce raised ValueError: engine died"):
            consuming.wait()
        assert not bystander.closed


def test_a_failing_consumer_frees_its_producers_and_stays_the_news():
    with runtime([("rollout", 0), ("reward", 0)]) as local:
        groups = local.start(specs("rollout", "reward"))
        texts = local.channel("texts", 1, producers=["rollout"], consumers=["reward"])
        producing = groups["rollout"].produce(texts, [1, 2, 3])
        groups["reward"].fail(DataError("no answer column"))
        with pytest.raises(DataError, match="no answer column"):
            producing.wait()


def test_a_failing_runner_frees_the_components():
    local = runtime([("critic", 0)])
    log: list[str] = []
    with pytest.raises(ZeroDivisionError), local:  # noqa: PT012
        groups = local.start(specs("critic", log=log))
        consuming = groups["critic"].consume(local.channel("rollouts", 1, consumers=["critic"]))
        until(lambda: "consuming" in log)
        raise ZeroDivisionError
    with pytest.raises(ChannelClosed, match="the run was stopped by ZeroDivisionError"):
        consuming.wait()


def test_channel_names_are_checked():
    with runtime([("rollout", 0), ("rollout", 1), ("reward", 0)]) as local:
        channel = local.channel("texts", 4, producers="rollout", consumers=["reward[0]", "runner"])
        assert channel.producers == ("rollout[0]", "rollout[1]")
        assert channel.consumers == ("reward[0]", "runner")
        with pytest.raises(ValueError, match="'texts' exists already and is open"):
            local.channel("texts", 4)
        channel.close()
        assert local.channel("texts", 4) is not channel
        with pytest.raises(ValueError, match=r"no component 'rolout' in the placement; did you mean 'rollout'\?"):
            local.channel("more", 4, producers=["rolout"])


def test_a_failing_constructor_is_typed_and_everything_started_is_closed():
    log: list[str] = []
    local = runtime([("actor", 0), ("critic", 0)], [("rollout", 0)])
    with pytest.raises(WorkerError, match=r"critic\[0\].__init__ raised OSError: no such model"):
        local.start(specs("actor", "critic", "rollout", log=log, broken="critic[0]"))
    assert log == ["new actor[0]", "close actor[0]"]


def test_components_and_placement_must_agree():
    with pytest.raises(PlacementError) as raised:
        runtime([("actor", 0), ("rewrad", 0)]).start(specs("actor", "reward"))
    assert [problem.key for problem in raised.value.problems] == [
        "cluster.component_placement.rewrad",
        "cluster.component_placement.reward",
    ]


def test_shutdown_closes_components_in_reverse_and_may_be_repeated():
    log: list[str] = []
    local = runtime([("actor", 0), ("critic", 0)])
    groups = local.start(specs("actor", "critic", log=log))
    channel = local.channel("rollouts", 4)
    local.shutdown()
    local.shutdown()
    assert log == ["new actor[0]", "new critic[0]", "close critic[0]", "close actor[0]"]
    with pytest.raises(WorkerDied, match=r"actor\[0\] was shut down and takes no call of echo"):
        groups["actor"].echo(1)
    with pytest.raises(ChannelClosed):
        channel.get()
    with pytest.raises(WorkerDied, match="after the runtime was shut down"):
        local.channel("late", 1)


def test_shutdown_fails_the_calls_that_still_queue():
    log: list[str] = []
    local, release = runtime([("actor", 0)]), threading.Event()
    actor = local.start(specs("actor", log=log))["actor"]
    running, queued = actor.hold(release), actor.echo(1)
    until(lambda: "holding" in log)
    held = next(iter(local._ranks.values()))
    ending = threading.Thread(target=lambda: (until(lambda: held._retired), release.set()))
    ending.start()
    local.shutdown()
    ending.join()
    assert running.wait() == [None]
    with pytest.raises(WorkerDied, match=r"actor\[0\] was shut down before echo ran"):
        queued.wait()


def test_shutdown_never_hangs_and_names_who_did_not_stop():
    log: list[str] = []
    local, release = runtime([("actor", 0), ("critic", 0)]), threading.Event()
    groups = local.start(specs("actor", "critic", log=log))
    groups["critic"].hold(release)
    until(lambda: "holding" in log)
    with pytest.raises(Deadline, match=r"critic\[0\] did not stop in time \(busy in hold for"):
        local.shutdown(timeout=0.1)
    assert "close actor[0]" in log
    release.set()


def test_a_component_that_is_constructed_after_the_shutdown_gave_up_is_closed():
    log: list[str] = []
    local, release = runtime([("rollout", 0)]), threading.Event()
    with ThreadPoolExecutor() as pool:
        pool.submit(local.start, specs("rollout", cls=SlowWorker, log=log, event=release))
        until(lambda: "constructing" in log)
        with pytest.raises(Deadline, match=r"rollout\[0\] did not stop in time \(busy in __init__ for"):
            local.shutdown(timeout=0.1)
        release.set()
        until(lambda: log[-1] == "close rollout[0]")


def test_an_error_in_close_is_raised_after_everything_is_closed():
    log: list[str] = []
    local = runtime([("actor", 0), ("critic", 0)])
    local.start(specs("actor", log=log) | specs("critic", cls=Unclosable, log=log))
    with pytest.raises(WorkerError, match=r"critic\[0\].close raised OSError: disk full"):
        local.shutdown()
    assert log[-1] == "close actor[0]"


def test_an_error_in_close_does_not_hide_the_runs_error():
    with pytest.raises(ZeroDivisionError) as raised, runtime([("critic", 0)]) as local:  # noqa: PT012
        local.start(specs("critic", cls=Unclosable))
        raise ZeroDivisionError
    assert "while shutting down: critic[0].close raised OSError: disk full" in raised.value.__notes__[0]


def test_undelivered_items_are_reported_at_shutdown(caplog):
    with caplog.at_level(logging.WARNING), runtime([("actor", 0)]) as local:
        local.channel("rollouts", 4).put_many([1, 2])
    assert "channel 'rollouts' was shut down with 2 items that were not received" in caplog.messages


@pytest.mark.parametrize("wait_on", ["call", "end", "channel"])
def test_keyboard_interrupt_ends_a_wait_promptly(wait_on):
    release = threading.Event()
    with runtime([("actor", 0)]) as local:
        actor = local.start(specs("actor"))["actor"]
        channel = local.channel("rollouts", 4)
        handle = actor.hold(release)
        waits = {"call": handle.wait, "end": handle.settle, "channel": channel.get}
        main, began = threading.get_ident(), threading.Event()

        def interrupt() -> None:
            began.wait()
            until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
            time.sleep(0.1)  # Python notices a signal just before the thread sleeps only when it wakes up
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):  # and no Deadline  # noqa: PT012
            began.set()
            waits[wait_on]()
        thread.join()
        release.set()


def test_settling_waits_for_the_end_of_a_call_however_it_ends():
    with runtime([("actor", 0)], deadline_s=0.2) as local:
        actor = local.start(specs("actor"))["actor"]
        release = threading.Event()
        handle = actor.hold(release)
        with pytest.raises(Deadline, match=r"waited 0.2 s for actor\.hold"):
            handle.settle()
        release.set()
        handle.settle()
        actor.fail(DataError("bad data")).settle()


def test_an_idle_rank_keeps_nothing_of_its_last_call_alive():
    with runtime([("actor", 0)]) as local:
        actor = local.start(specs("actor"))["actor"]
        payload = threading.Event()
        payload.set()
        reference = weakref.ref(payload)
        actor.hold(payload).wait()
        del payload
        actor.about().wait()
        until(lambda: reference() is None)
