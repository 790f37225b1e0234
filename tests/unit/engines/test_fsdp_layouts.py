"""Two FSDP2 ranks that share tokens, train adapters or keep states in main memory, beside one plain process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.state_files import read_whole

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
SHARING_TOKENS = [("actor", "context"), ("critic", "context"), ("actor", "lora, context, layers twice")]
variants = pytest.mark.parametrize(("kind", "variant"), [*SHARING_TOKENS, ("actor", "offload"), ("critic", "lora")])


@pytest.fixture(scope="module")
def fsdp_ranks(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(Path(__file__).with_name("fsdp_ranks.py"))


@pytest.fixture(scope="module")
def results(fsdp_ranks: ModuleType, two_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The results of one plain process, and under 0 and 1 those of each of two ranks."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    one: dict[str, Any] = {}
    for kind in fsdp_ranks.KINDS:
        for name, lora in (("plain", None), ("lora", fsdp_ranks.LORA)):
            one[f"{kind} {name}"] = fsdp_ranks.run(fsdp_ranks.engine(kind, lora=lora), kind, folder / f"{kind} {name}")
    one["bfloat16"] = fsdp_ranks.run(fsdp_ranks.engine("actor", dtype=torch.bfloat16), "actor")
    two_ranks(Path(fsdp_ranks.__file__), folder)
    for (kind, variant), options in fsdp_ranks.VARIANTS.items():
        trained, saved = fsdp_ranks.engine(kind, lora=options.get("lora")), folder / f"{kind} {variant}"
        one[f"{kind} {variant} resumed"] = fsdp_ranks.resumed(trained, kind, saved)
        one[f"{kind} {variant} saved"] = read_whole(saved)
    return {rank: torch.load(folder / f"rank{rank}.pt") for rank in range(2)} | {"one": one}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def without_balance(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that one rank has too."""
    return {name: value for name, value in metrics.items() if not name.startswith("balance/")}


def alone(results: dict[Any, Any], kind: str, variant: str) -> dict[str, Any]:
    return results["one"][f"{kind} {'lora' if 'lora' in variant else 'plain'}"]


@variants
def test_the_numbers_of_one_process(results: Any, kind: str, variant: str) -> None:
    expected = alone(results, kind, variant)
    moved = [float((expected["outputs"][name] - tensor).abs().max()) for name, tensor in expected["first"].items()]
    assert min(moved) > 1e-2, "three steps that change nothing would prove nothing"
    for rank in range(2):
        actual = results[rank][f"{kind} {variant}"]
        for part in ("first", "parameters", "outputs", "continued"):
            assert_equal(actual[part], expected[part])
        for metrics, other in zip(
            actual["metrics"] + actual["odd"], expected["metrics"] + expected["odd"], strict=True
        ):
            assert without_balance(metrics) == pytest.approx(other, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "variant"), SHARING_TOKENS)
def test_sequences_that_are_not_packed_give_the_same_numbers(results: Any, kind: str, variant: str) -> None:
    expected = alone(results, kind, variant)["metrics"]
    for rank in range(2):
        for metrics, packed in zip(results[rank][f"{kind} {variant}"]["unpacked"], expected, strict=True):
            assert without_balance(metrics) == pytest.approx(packed, rel=1e-5, abs=1e-6)


@variants
def test_states_go_from_one_process_to_two_ranks_and_back(results: Any, kind: str, variant: str) -> None:
    undisturbed = alone(results, kind, variant)
    for actual in (results["one"][f"{kind} {variant} resumed"], results[0][f"{kind} {variant}"]["resumed"]):
        for part in ("outputs", "continued"):
            assert_equal(actual[part], undisturbed[part])


@variants
def test_ranks_agree_to_the_bit(results: Any, kind: str, variant: str) -> None:
    first, second = (results[rank][f"{kind} {variant}"]["metrics"] for rank in range(2))
    assert first == second


@pytest.mark.parametrize(("kind", "variant"), [("critic", "lora"), ("actor", "lora, context, layers twice")])
def test_only_adapters_and_the_value_head_are_trained_and_saved(results: Any, kind: str, variant: str) -> None:
    learned = alone(results, kind, "lora")
    changed = {
        name for name, tensor in learned["begin"].items() if not torch.equal(tensor, learned["parameters"][name])
    }
    adapters = {name for name in learned["begin"] if ".lora_" in name}
    assert len(adapters) == 2 * 3 * 2  # A and B of three matrices in two layers
    heads = {"model.head.weight", "model.head.bias"} if kind == "critic" else set()
    assert changed == adapters | heads
    saved = results["one"][f"{kind} {variant} saved"]
    optimizer = {f"optimizer.{name}.{key}" for name in changed for key in ("step", "exp_avg", "exp_avg_sq")}
    assert saved.keys() == {f"model.{name}" for name in changed} | optimizer


def test_adapters_learn(ranks: ModuleType, fsdp_ranks: ModuleType) -> None:
    """The policy loss on one batch falls by adapters alone, and the gradients of what is frozen are never made."""
    trained = fsdp_ranks.engine("actor", lora=fsdp_ranks.LORA)
    batch = ranks.batch("actor")
    batch.log_probs.copy_(ranks.outputs(trained, "actor")["log_probs"])  # ratios start at 1
    losses = [trained.step(batch, ranks.loss("actor"), MicroBatches()).finalize()["actor/loss"] for _ in range(24)]
    assert losses[-1] < losses[0] - 0.02
    assert len(trained.parameters) == len(trained.optimizer.state) == 2 * 3 * 2


def test_one_key_head_serves_the_ranks_that_share_tokens(results: Any) -> None:
    for rank in range(2):
        actual = results[rank]["attention"]
        torch.testing.assert_close(actual["actual"], actual["expected"], rtol=1e-6, atol=1e-6)


def test_layers_gathered_in_bfloat16_are_the_autocast_of_one_process(results: Any) -> None:
    expected = results["one"]["bfloat16"]
    exact = alone(results, "actor", "plain")
    for rank in range(2):
        actual = results[rank]["bfloat16"]
        assert all(tensor.dtype == torch.float32 for tensor in actual["parameters"].values())
        assert_equal(actual["first"], expected["first"], 2e-2)
        assert not torch.equal(actual["first"]["log_probs"], exact["first"]["log_probs"])
        for metrics, other in zip(actual["metrics"], expected["metrics"], strict=True):
            assert metrics["grad_norm"] == pytest.approx(other["grad_norm"], rel=3e-2)
