"""Two ranks train to the same numbers as one: FSDP2 on two gloo processes beside the same runs in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
kinds = pytest.mark.parametrize("kind", ["actor", "critic", "embodied"])


@pytest.fixture(scope="module")
def results(ranks: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What one process found, and under 0 and 1 what each of two ranks found."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    one: dict[Any, Any] = {"run": ranks.run(folder), "poisoned": {kind: ranks.poisoned(kind) for kind in ranks.KINDS}}
    processes = [
        subprocess.Popen(
            [sys.executable, ranks.__file__, str(rank), "2", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    one["resumed"] = ranks.resumed(folder, 2)
    loaded: dict[Any, Any] = {rank: torch.load(folder / f"rank{rank}.pt") for rank in range(2)}
    return loaded | {"one": one}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


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
        found = results[rank]["run"][kind]
        for name in ("few rows", "one row"):  # fewer rows than a micro-batch for everyone, and a rank without any
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)
        for metrics, alone in zip(found["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(alone, rel=1e-5, abs=1e-6)


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


@kinds
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_rank(results, kind) -> None:
    for who in ("one", 0, 1):
        found = results[who]["poisoned"][kind]
        assert found["answer"] is None
        assert found["unchanged"]
        assert found["next"] is not None
        assert_equal(found["parameters"], results["one"]["run"][kind]["parameters"])  # as if it had not happened


def test_layers_that_are_computed_again_change_nothing(results) -> None:
    expected = results["one"]["run"]["actor"]
    for rank in range(2):
        found = results[rank]["recomputed"]
        assert_equal(found["parameters"], expected["parameters"])
        for metrics, alone in zip(found["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(alone, rel=1e-5, abs=1e-6)
