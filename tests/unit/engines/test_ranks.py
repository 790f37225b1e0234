"""Two FSDP ranks train to the numbers of one plain process.

Variants share the tokens of a sequence, train adapters, compute layers twice, or keep their state in main memory.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_checks import assert_close, assert_gathered_in_bfloat16, assert_moved, learned

from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.state_files import read_whole

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
PLAIN = ["actor", "critic", "embodied"]
CONTEXT = [
    "actor context",
    "critic context",
    "actor lora, context, layers twice",
    "experts context, layers twice",
]
variants = pytest.mark.parametrize("variant", [*PLAIN, *CONTEXT, "experts", "actor offload", "critic lora"])


@pytest.fixture(scope="module")
def results(ranks: ModuleType, two_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The results of one process, and under 0 and 1 those of each of two ranks."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    one: dict[str, Any] = {"in order": ranks.in_order()}
    for name, options in ranks.SINGLE.items():
        one[name] = ranks.run(ranks.engine(name.split()[0], **options), name.split()[0], folder / f"{name} 1")
    one["bfloat16"] = ranks.run(ranks.engine("actor", dtype=torch.bfloat16), "actor")
    two_ranks(Path(ranks.__file__), folder)
    for name in ranks.VARIANTS:
        kind, options = name.split()[0], ranks.SINGLE[ranks.single(name)]
        one[f"{name} resumed"] = ranks.resumed(ranks.engine(kind, **options), kind, folder / f"{name} 2")
    one["saved"] = {name: read_whole(folder / f"{name} 2") for name in ranks.VARIANTS if "lora" in name}
    one["bytes"] = {size: ranks.bytes_of_ranks(folder / f"critic {size}") for size in (1, 2)}
    return {rank: torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)} | {"one": one}


def alone(results: dict[Any, Any], variant: str) -> dict[str, Any]:
    return results["one"][f"{variant.split()[0]} lora" if "lora" in variant else variant.split()[0]]


@variants
def test_parameters_and_outputs(results, variant: str) -> None:
    expected = alone(results, variant)
    assert_moved(expected)
    for rank in range(2):
        actual = results[rank][variant]
        for part in ("start", "parameters", "outputs", "continued"):
            assert_close(actual[part], expected[part], 1e-6)
        assert_gathered_in_bfloat16(actual)
        assert learned(actual) == [pytest.approx(metrics, rel=1e-5, abs=1e-6) for metrics in learned(expected)]


@pytest.mark.parametrize("variant", [*PLAIN, *CONTEXT])
def test_a_step_that_is_not_finite_on_one_rank_changes_no_rank(ranks: ModuleType, results, variant: str) -> None:
    """Nor do sequences that are not packed change losses and gradient norms."""
    expected = alone(results, variant)
    reports = [results[rank][variant]["poisoned"] for rank in range(2)]
    if variant in PLAIN:
        reports.append(ranks.poisoned(ranks.engine(variant), variant))
    for actual in reports:
        assert actual["answer"] is None
        assert actual["unchanged"]
        assert_close(actual["parameters"], expected["parameters"], 1e-6)
        assert learned(actual) == [pytest.approx(one, rel=1e-5, abs=1e-6) for one in expected["metrics"]]


def test_balance_is_measured_and_changes_no_number(results) -> None:
    expected = results["one"]["in order"]
    for rank in range(2):
        in_order, balanced = results[rank]["in order"], results[rank]["actor"]["metrics"][0]
        assert_close(in_order["parameters"], expected["parameters"], 1e-6)
        assert learned({"metrics": [in_order["metrics"]]}) == [pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)]
        assert in_order["metrics"]["balance/after_max"] == in_order["metrics"]["balance/before_max"]
        assert 1 <= balanced["balance/after_max"] < balanced["balance/before_max"]
        assert balanced["balance/before_max"] == in_order["metrics"]["balance/before_max"]
        assert not any(name.startswith("balance/") for name in results[rank]["embodied"]["metrics"][0])


@variants
def test_ranks_agree_to_the_bit(results, variant: str) -> None:
    assert results[0][variant]["metrics"] == results[1][variant]["metrics"]


@variants
def test_states_go_from_one_process_to_two_ranks_and_back(results, variant: str) -> None:
    for actual in (results["one"][f"{variant} resumed"], *(results[rank][variant]["resumed"] for rank in range(2))):
        for part in ("outputs", "continued"):
            assert_close(actual[part], alone(results, variant)[part], 1e-6)


def test_each_rank_writes_its_own_half_of_a_state(results) -> None:
    (whole,), halves = results["one"]["bytes"][1], results["one"]["bytes"][2]
    assert sum(halves) == whole, "each element once"
    assert max(halves) < 0.6 * whole


def test_shards_that_leave_their_device_after_every_update_change_no_bit(results) -> None:
    for rank in range(2):
        expected, actual = results[rank]["actor"], results[rank]["offloaded"]
        assert actual["held"] == [0, 0, 0]
        assert actual["metrics"] == expected["metrics"]
        for part in ("outputs", "parameters"):
            assert all(torch.equal(actual[part][name], tensor) for name, tensor in expected[part].items())


@pytest.mark.parametrize("variant", ["critic lora", "actor lora, context, layers twice"])
def test_only_adapters_and_the_value_head_are_trained_and_saved(results, variant: str) -> None:
    run = alone(results, variant)
    changed = {name for name, tensor in run["begin"].items() if not torch.equal(tensor, run["parameters"][name])}
    adapters = {name for name in run["begin"] if ".lora_" in name}
    assert len(adapters) == 2 * 3 * 2  # A and B of three matrices in two layers
    heads = {"model.head.weight", "model.head.bias"} if variant.startswith("critic") else set()
    assert changed == adapters | heads
    optimizer = {f"optimizer.{name}.{key}" for name in changed for key in ("step", "exp_avg", "exp_avg_sq")}
    assert results["one"]["saved"][variant].keys() == {f"model.{name}" for name in changed} | optimizer


def test_adapters_learn(ranks: ModuleType) -> None:
    """The policy loss on one batch falls by adapters alone, and frozen parameters get no gradient."""
    trained = ranks.engine("actor", lora=ranks.LORA)
    batch = ranks.batch("actor")
    batch.log_probs.copy_(ranks.outputs(trained, "actor")["log_probs"])  # ratios start at 1
    losses = [trained.step(batch, ranks.loss("actor"), MicroBatches()).finalize()["actor/loss"] for _ in range(24)]
    assert losses[-1] < losses[0] - 0.02
    assert len(trained.parameters) == len(trained.optimizer.state) == 2 * 3 * 2


@pytest.mark.parametrize("kind", ["attention", "attention with features"])
def test_one_key_head_serves_the_ranks_that_share_tokens(results, kind: str) -> None:
    for rank in range(2):
        actual = results[rank][kind]
        torch.testing.assert_close(actual["actual"], actual["expected"], rtol=1e-6, atol=1e-6)


def test_layers_gathered_in_bfloat16_are_the_autocast_of_one_process(results) -> None:
    expected, exact = results["one"]["bfloat16"], results["one"]["actor"]
    for rank in range(2):
        actual = results[rank]["bfloat16"]
        assert all(tensor.dtype == torch.float32 for tensor in actual["parameters"].values())
        assert_close(actual["start"], expected["start"], 2e-2)
        assert not torch.equal(actual["start"]["log_probs"], exact["start"]["log_probs"])
        for metrics, other in zip(actual["metrics"], expected["metrics"], strict=True):
            assert metrics["grad_norm"] == pytest.approx(other["grad_norm"], rel=3e-2)
