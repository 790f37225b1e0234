"""What a rank in another process has told, when its results arrive in another order than its calls were made."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from stand_ins import Placed
from waiting import HANG_S

from rl_platform.errors import HostDied
from rl_platform.runtime.ray.host_process import CallResult
from rl_platform.runtime.ray.serialization import pack
from rl_platform.runtime.ray.worker_proxy import HostProxy, WorkerProxy


class Host:
    """A process that answers when the test says so."""

    death = None

    def __init__(self) -> None:
        self.calls: list[Future[CallResult]] = []

    def send(self, *_: Any) -> Future[CallResult]:
        self.calls.append(Future())
        return self.calls[-1]

    def answer(self, number: int, seconds: float) -> None:
        timings = {"step": (number + 1, seconds)}
        peak = int(seconds)
        self.calls[number].set_result(CallResult(pack(number, None), None, timings, peak))  # type: ignore[arg-type]


def worker_of(host: Host) -> WorkerProxy:
    parts: list[Any] = [host, ("actor", 0), None, lambda *_: None, lambda *_: None, lambda _: None]
    return WorkerProxy(*parts)


def test_timings_are_those_of_the_latest_call_in_whatever_order_results_arrive() -> None:
    host = Host()
    worker = worker_of(host)
    asked = [worker.submit("step", (), {}) for _ in range(3)]
    for number, seconds in ((1, 2.0), (2, 3.0), (0, 1.0)):
        host.answer(number, seconds)
    assert [future.result() for future in asked] == [0, 1, 2]
    assert worker.timings() == {"step": (3, 3.0)}
    assert worker.memory_peak() == 3


def test_a_process_that_was_started_again_begins_anew_and_what_is_left_of_the_old_one_does_not_count() -> None:
    old, new = Host(), Host()
    worker = worker_of(old)
    worker.submit("step", (), {}), worker.submit("step", (), {})
    old.answer(0, 1.0)
    worker.move(new)  # type: ignore[arg-type]
    worker.submit("step", (), {})
    new.answer(0, 5.0)
    old.answer(1, 2.0)
    assert worker.timings() == {"step": (1, 5.0)}


def test_an_answer_arrives_while_another_call_is_still_being_sent() -> None:
    host, sending, sent = Host(), threading.Event(), threading.Event()
    worker = worker_of(host)
    first = worker.submit("step", (), {})
    plain = host.send

    def held(*arguments: Any) -> Future[CallResult]:
        sending.set()
        sent.wait()
        return plain(*arguments)

    host.send = held  # type: ignore[method-assign]
    second = threading.Thread(target=worker.submit, args=("step", (), {}))
    second.start()
    try:
        sending.wait()
        answering = threading.Thread(target=host.answer, args=(0, 1.0), daemon=True)
        answering.start()
        assert first.result(HANG_S) == 0
    finally:
        sent.set()
        second.join()


class RaisingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("the tracker is gone")


def test_a_death_is_noticed_after_a_record_that_could_not_be_logged(request: pytest.FixtureRequest) -> None:
    log, handler, deaths = logging.getLogger("rl_platform.test"), RaisingHandler(), list[Any]()
    log.addHandler(handler)
    request.addfinalizer(lambda: log.removeHandler(handler))
    pulses: list[Future[Any]] = []

    def send(method: str) -> Future[Any]:
        assert method == "pulse"
        pulses.append(Future())
        return pulses[-1]

    host = HostProxy("host0", Placed.of([("actor", 0)]).hosts[0], send, lambda host, error: deaths.append(error))
    host.watch()
    pulses[0].set_result(({}, [(log.name, logging.WARNING, "the disk is nearly full")]))
    pulses[1].set_exception(HostDied("the process of host0 died"))
    assert deaths == [host.death]
