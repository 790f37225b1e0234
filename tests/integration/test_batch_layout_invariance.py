"""Batch layout is not algorithm: the same seed and data give the same actor and critic however the work is cut up.

Two PPO steps of two epochs on two mini-batches, eight optimizer steps of every model, with all terms of the losses on.
Parameters after them differ by no more than 1e-6 of the largest parameter of their model, which is rounding in float32
(its unit in the last place is 1.2e-7); every tensor of the model has moved by thousands of times that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

TOLERANCE = 1e-6  # of the largest parameter of a model
MOVED = 1000  # times the tolerance: how far each tensor moves at least

LAYOUTS = {
    "micro-batches of 1": {"rows": 1},
    "micro-batches of 2": {"rows": 2},
    "micro-batches of 8": {"rows": 8},
    "micro-batches by tokens": {"tokens": 40},
    "padding +37": {"padding": 37},
    "padding +37, micro-batches of 2": {"padding": 37, "rows": 2},
    "padded rows in transformers": {"packed": False},
    "padded rows in transformers, +37, micro-batches of 2": {"packed": False, "padding": 37, "rows": 2},
}
MICRO_BATCHES = [name for name, layout in LAYOUTS.items() if layout.keys() == {"rows"}]
POLICIES = ("embodied", "recurrent")
EVERY = [(case, name) for case in ("gae", "grpo") for name in LAYOUTS]
EVERY += [(case, name) for case in POLICIES for name in MICRO_BATCHES]
COUNTS = {"gae": 4, "grpo": 4, "embodied": 2, "recurrent": 2}
RANKED = [(case, number) for case, count in COUNTS.items() for number in range(count)]


@pytest.fixture(scope="module")
def layouts(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(Path(__file__).with_name("layouts.py"))


@pytest.fixture(scope="module")
def base(layouts: ModuleType) -> Callable[[str], dict[str, Any]]:
    """base("gae"): what one process learns with packed, unpadded mini-batches at once."""
    return cache(lambda case: layouts.learn(case, layouts.BASE))


@pytest.fixture(scope="module")
def ranked(layouts: ModuleType, two_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks learned: by case, one entry for each of `layouts.RANKED`."""
    folder = tmp_path_factory.mktemp("ranks")
    two_ranks(Path(layouts.__file__), folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of a parameter, relative to the largest parameter of its model."""
    assert found["end"].keys() == expected["end"].keys()
    ratios = []
    for model, parameters in expected["end"].items():
        assert found["end"][model].keys() == parameters.keys()
        largest = max(float(tensor.abs().max()) for tensor in parameters.values())
        differences = [float((found["end"][model][name] - tensor).abs().max()) for name, tensor in parameters.items()]
        ratios.append(max(differences) / largest)
    return max(ratios)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert worst(found, expected) <= TOLERANCE
    for model in expected["end"]:  # the optimizer would hide a gradient of another length
        name = f"{model}/grad_norm"
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5)
        assert found["metrics"][f"{model}/loss"] == pytest.approx(
            expected["metrics"][f"{model}/loss"], rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("case", ["gae", "grpo", *POLICIES])
def test_every_tensor_moves_by_much_more_than_the_tolerance(base: Any, case: str) -> None:
    learned = base(case)
    assert set(learned["end"]) == ({"actor", "critic"} if case == "gae" else {"actor"})
    for model, end in learned["end"].items():
        largest = max(float(tensor.abs().max()) for tensor in end.values())
        for name, tensor in end.items():
            moved = float((tensor - learned["start"][model][name]).abs().max())
            assert moved > MOVED * TOLERANCE * largest, f"{model} {name}"


@pytest.mark.parametrize(("case", "name"), EVERY)
def test_one_process(layouts: ModuleType, base: Any, case: str, name: str) -> None:
    assert_same(layouts.learn(case, layouts.Layout(**LAYOUTS[name])), base(case))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
@pytest.mark.parametrize(("case", "number"), RANKED)
def test_two_ranks(ranked: Any, layouts: ModuleType, base: Any, case: str, number: int) -> None:
    assert len(layouts.RANKED[case]) == sum(name == case for name, _ in RANKED)
    for rank in range(2):
        assert_same(ranked[rank][case][number], base(case))


@pytest.mark.parametrize("case", ["gae", "grpo"])
def test_a_mean_per_micro_batch_would_be_seen(
    layouts: ModuleType, base: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect that these tests are for, put in on purpose: each micro-batch divides by its own tokens."""
    from rl_platform.algorithms.aggregation import Denominators
    from rl_platform.engines.training.fsdp import FSDPEngine

    step = FSDPEngine.step

    def local_step(self: Any, mini_batch: Any, loss: Any, micro_batches: Any) -> Any:
        def local(outputs: Any, part: Any, denominators: Any) -> Any:
            total, metrics = loss(outputs, part, Denominators.of(part.mask, self.horizon, part.correct))
            return total * len(part) / len(mini_batch), metrics

        return step(self, mini_batch, local, micro_batches)

    monkeypatch.setattr(FSDPEngine, "step", local_step)
    assert worst(layouts.learn(case, layouts.Layout(rows=2)), base(case)) > 100 * TOLERANCE
