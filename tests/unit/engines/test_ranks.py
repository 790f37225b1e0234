"""Two ranks train to the same numbers as one: FSDP2 on two gloo processes beside the same runs in this process."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
kinds = pytest.mark.parametrize("kind", ["actor", "critic", "embodied"])


@pytest.fixture(scope="module")
def results(ranks: ModuleType, two_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The results of one process, and under 0 and 1 those of each of two ranks."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    one: dict[Any, Any] = {"run": ranks.run(folder), "poisoned": {kind: ranks.poisoned(kind) for kind in ranks.KINDS}}
    two_ranks(Path(ranks.__file__), folder)
    one["resumed"] = ranks.resumed(folder, 2)
    one["bytes"] = {size: ranks.bytes_of_ranks(folder / f"critic-{size}") for size in (1, 2)}
    loaded: dict[Any, Any] = {rank: torch.load(folder / f"rank{rank}.pt") for rank in range(2)}
    return loaded | {"one": one}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
        )


@kinds
def test_parameters_and_outputs(results, kind) -> None:
    expected = results["one"]["run"][kind]
    moved = [(expected["outputs"][name] - tensor).abs().max() for name, tensor in expected["start"].items()]
    assert min(moved) > 1e-2, "three steps that change nothing would prove nothing"
    for rank in range(2):
        for part in ("start", "parameters", "outputs", "continued"):
            assert_equal(results[rank]["run"][kind][part], expected[part])


@kinds
def test_every_rank_reports_the_metrics_of_the_whole_mini_batch(results, kind) -> None:
    expected = results["one"]["run"][kind]
    for rank in range(2):
        actual = results[rank]["run"][kind]
        for name in ("few rows", "one row"):  # fewer rows than a micro-batch for everyone, and a rank without any
            assert without_balance(actual[name]) == pytest.approx(expected[name], rel=1e-5, abs=1e-6)
        for metrics, alone in zip(actual["metrics"], expected["metrics"], strict=True):
            assert without_balance(metrics) == pytest.approx(alone, rel=1e-5, abs=1e-6)


@kinds
def test_sequences_that_are_not_packed_give_the_same_losses_and_gradient_norms(results, kind) -> None:
    expected = results["one"]["run"][kind]["metrics"]
    for who in ("one", 0, 1):
        actual = results[who]["poisoned"][kind]
        for metrics, packed in zip([*actual["metrics"], actual["next"]], expected, strict=True):
            assert without_balance(metrics) == pytest.approx(packed, rel=1e-5, abs=1e-6)


def without_balance(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that one rank has too."""
    return {name: value for name, value in metrics.items() if not name.startswith("balance/")}


def test_balance_is_measured_and_changes_no_number(results) -> None:
    expected = results["one"]["run"]["in order"]
    assert without_balance(expected["metrics"]) == expected["metrics"]
    for rank in range(2):
        in_order, balanced = results[rank]["run"]["in order"], results[rank]["run"]["actor"]["metrics"][0]
        assert_equal(in_order["parameters"], expected["parameters"])
        assert without_balance(in_order["metrics"]) == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        assert in_order["metrics"]["balance/after_max"] == in_order["metrics"]["balance/before_max"]
        assert 1 <= balanced["balance/after_max"] < balanced["balance/before_max"]
        assert balanced["balance/before_max"] == in_order["metrics"]["balance/before_max"]
        assert not any(name.startswith("balance/") for name in results[rank]["run"]["embodied"]["metrics"][0])


@pytest.mark.parametrize("kind", ["actor", "embodied"])
def test_ranks_agree_to_the_bit_on_what_may_stop_the_update(results, kind) -> None:
    drifts = [[m["actor/approx_kl_k3"] for m in results[rank]["run"][kind]["metrics"]] for rank in range(2)]
    assert drifts[0] == drifts[1]
    assert max(drifts[0]) > 0


@kinds
@pytest.mark.parametrize("who", ["one", 0, 1])
def test_a_state_saved_by_other_ranks_goes_on_equally(results, kind, who) -> None:
    """`one` loaded what two ranks saved, the two ranks what one saved."""
    undisturbed = results["one"]["run"][kind]
    for part in ("outputs", "continued"):
        assert_equal(results[who]["resumed"][kind][part], undisturbed[part])


def test_each_rank_writes_its_own_half_of_a_state(results) -> None:
    (whole,), halves = results["one"]["bytes"][1], results["one"]["bytes"][2]
    assert sum(halves) == whole, "each element once"
    assert max(halves) < 0.6 * whole


@kinds
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_rank(results, kind) -> None:
    for who in ("one", 0, 1):
        actual = results[who]["poisoned"][kind]
        assert actual["answer"] is None
        assert actual["unchanged"]
        assert actual["next"] is not None
        assert_equal(actual["parameters"], results["one"]["run"][kind]["parameters"])  # as if it had not happened


def test_layers_that_are_computed_again_change_nothing(results) -> None:
    expected = results["one"]["run"]["actor"]
    for rank in range(2):
        actual = results[rank]["recomputed"]
        assert_equal(actual["parameters"], expected["parameters"])
        for metrics, alone in zip(actual["metrics"], expected["metrics"], strict=True):
            assert without_balance(metrics) == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_shards_that_leave_their_device_after_every_update_change_no_bit(results) -> None:
    for rank in range(2):
        expected, actual = results[rank]["run"]["actor"], results[rank]["offloaded"]
        assert actual["held"] == [0, 0, 0]
        assert actual["metrics"] == expected["metrics"]
        for part in ("outputs", "parameters"):
            assert all(torch.equal(actual[part][name], tensor) for name, tensor in expected[part].items())
