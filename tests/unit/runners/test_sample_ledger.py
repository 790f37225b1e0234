"""Every response that was issued is trained on once, or rejected."""

from __future__ import annotations

import pytest

from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.sample_ledger import SampleLedger, Unaccounted


def prompt(index: int) -> Prompt:
    return Prompt(index, "", "", (1,))


@pytest.fixture
def ledger() -> SampleLedger:
    ledger = SampleLedger()
    ledger.issue([0, 1, 0], samples=2)
    return ledger


def test_counts(ledger: SampleLedger) -> None:
    ledger.trained([0, 0, 1])
    ledger.rejected([Trajectory(prompt(1), 1, (), (), "stop", 0)])
    assert ledger.metrics() == {"perf/samples_rejected": 1, "perf/samples_dropped": 0, "perf/samples_in_flight": 2}
    ledger.check({0: 2})
    again = SampleLedger()
    again.load_state_dict(ledger.state_dict())
    again.check({0: 2})
    again.trained([0, 0])
    again.check({})


def test_dropped_responses_have_ended(ledger: SampleLedger) -> None:
    ledger.dropped([Trajectory(prompt(0), sample, (), (), "stop", 0) for sample in range(4)])
    assert ledger.metrics() == {"perf/samples_rejected": 0, "perf/samples_dropped": 4, "perf/samples_in_flight": 2}
    ledger.check({1: 2})
    with pytest.raises(Unaccounted, match="1 responses trained and were not in flight"):
        ledger.trained([0])


def test_a_checkpoint_without_dropped_responses(ledger: SampleLedger) -> None:
    state = ledger.state_dict()
    del state["counts"]["dropped"]
    again = SampleLedger()
    again.load_state_dict(state)
    again.dropped([Trajectory(prompt(1), 0, (), (), "stop", 0)])
    assert again.metrics()["perf/samples_dropped"] == 1


def test_a_response_that_is_trained_on_twice(ledger: SampleLedger) -> None:
    ledger.trained([1, 1])
    with pytest.raises(Unaccounted, match="1 responses trained and were not in flight"):
        ledger.trained([1])


def test_a_lost_response_and_one_of_another_prompt_do_not_cancel_out(ledger: SampleLedger) -> None:
    with pytest.raises(Unaccounted, match="1 responses were issued and are lost"):
        ledger.check({0: 3, 1: 3})
    with pytest.raises(Unaccounted, match="1 responses are held and were not issued"):
        ledger.check({0: 4, 1: 2, 2: 1})


def test_what_a_checkpoint_without_counts_holds_is_taken_over() -> None:
    ledger = SampleLedger()
    ledger.check({4: 2})
    ledger.trained([4, 4])
    ledger.check({})
