"""The timeline: what is recorded where, when it is written, and that nothing is recorded otherwise."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S, until

from rl_platform.runners.watching.trace_file import Timeline, trace_events
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.waits import waiting_on
from rl_platform.tracing import Recorder, TraceSpan, recorder


@pytest.fixture(autouse=True)
def _leave_it_off() -> Iterator[None]:
    yield
    recorder.on = False
    recorder.drain()


def test_nothing_is_recorded_while_it_is_off() -> None:
    own = Recorder()
    own.add("call", "update", time.monotonic())
    assert own.drain() == []


def test_a_span_knows_its_thread_and_its_length() -> None:
    own = Recorder()
    own.on = True

    def work() -> None:
        own.settle("actor,critic[0]", "critic[0]")
        began = time.monotonic()
        time.sleep(0.02)
        own.add("call", "update", began)

    now, before = time.time(), time.monotonic()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (span,) = own.drain()
    assert (span.host, span.lane, span.name) == ("actor,critic[0]", "critic[0]", "update")
    assert 0.02 <= span.seconds <= time.monotonic() - before
    assert now - 1 < span.began < span.began + span.seconds < time.time() + 1  # clocks may be set meanwhile
    assert own.drain() == []


def test_a_wait_on_a_channel_is_a_span_and_a_hand_over_without_a_wait_is_none() -> None:
    recorder.on = True
    channel: Channel[int] = Channel("rollouts", capacity=1, deadline_s=HANG_S)
    channel.put(1)
    channel.get()
    assert recorder.drain() == []
    main = threading.get_ident()
    late = threading.Thread(target=lambda: (until(lambda: waiting_on(main)), time.sleep(0.05), channel.put(2)))
    late.start()
    channel.get()
    late.join()
    (span,) = recorder.drain()
    assert (span.kind, span.name) == ("wait", "rollouts: empty")
    assert span.seconds > 0.03


def test_trace_events_name_hosts_and_lanes_once() -> None:
    spans = [
        TraceSpan("h2", "rollout[0]", "call", "generate", began=101.0, seconds=0.5),
        TraceSpan("run", "runner", "phase", "collect", began=100.0, seconds=2.0),
        TraceSpan("h2", "rollout[0]", "wait", "prompts: empty", began=101.25, seconds=0.25),
    ]
    content = trace_events(spans)
    events = json.loads(json.dumps(content))["traceEvents"]
    names = [(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"]
    assert names == [
        ("process_name", "run"),
        ("thread_name", "runner"),
        ("process_name", "h2"),
        ("thread_name", "rollout[0]"),
    ]
    first, second, third = (event for event in events if event["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"]) == ("collect", 0.0, 2e6)
    assert (second["name"], second["ts"], second["pid"]) == ("generate", 1e6, 2)
    assert second["tid"] == third["tid"] != first["tid"]


def test_written_after_the_steps_asked_for_and_off_from_then_on(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", steps=2)
    timeline.start(None)
    timeline.step(0, {})  # the validation before the first step
    for step in (1, 2, 3):
        with timeline.phase(f"train {step}"):
            pass
        timeline.step(step, {})
        assert timeline.path.exists() == (step >= 2)
    timeline.close()
    names = [event["name"] for event in json.loads(timeline.path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(names) == ["start", "step 1", "step 2", "train 1", "train 2"]


@pytest.mark.parametrize("steps", [9, 0])
def test_a_run_that_ends_earlier_leaves_what_there_is_and_no_steps_leave_no_file(tmp_path: Path, steps: int) -> None:
    timeline = Timeline(tmp_path / "trace.json", steps)
    timeline.start(None)
    timeline.step(1, {})
    timeline.close()
    assert timeline.path.exists() == (steps > 0)
