from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from rl_platform.algorithms.metrics import Metrics, Sums, over


def measured(numbers: list[float], count: float) -> Metrics:
    x = torch.tensor(numbers)
    return Metrics(
        {("sum", "twice"): Sums(torch.stack((x.sum(), 2 * x.sum())), count)}, {"min": x.min()}, {"max": x.max()}
    )


def test_merged_parts_equal_the_whole() -> None:
    parts = measured([1.0, 2.0, 6.0], 3).merge(measured([-4.0], 1))
    assert parts.finalize() == measured([1.0, 2.0, 6.0, -4.0], 4).finalize()
    assert parts.finalize() == {"sum": 1.25, "twice": 2.5, "min": -4.0, "max": 6.0}


def test_python_and_tensor_counts_add_up() -> None:
    dense, masked = measured([1.0], 1.0), measured([3.0], torch.tensor(1))
    assert dense.merge(masked).finalize()["sum"] == masked.merge(dense).finalize()["sum"] == 2.0


def test_different_metrics_are_joined() -> None:
    other = Metrics({("other",): Sums(torch.tensor([3.0]), 2)})
    assert measured([1.0], 1).merge(other).finalize()["other"] == 1.5
    assert Metrics().merge(other).finalize() == {"other": 1.5}


def test_a_name_in_two_vectors_is_one_metric() -> None:
    both = Metrics(over(2.0, {"a": torch.tensor(3.0)})).merge(
        Metrics(over(4.0, {"a": torch.tensor(6.0), "b": torch.tensor(8.0)}))
    )
    assert both.finalize() == {"a": 1.5, "b": 2.0}
    assert both.mean("a") == 1.5


def test_merging_leaves_the_parts_alone() -> None:
    one, other = measured([1.0], 1), measured([3.0], 1)
    one.merge(other)
    assert one.finalize() == {"sum": 1.0, "twice": 2.0, "min": 1.0, "max": 1.0}


def numpy_measured(numbers: list[float]) -> Metrics:
    sums = Sums(np.array([sum(numbers), 2.0 * sum(numbers)]), float(len(numbers)))
    return Metrics({("sum", "twice"): sums}, {"min": min(numbers)}, {"max": max(numbers)})


@pytest.mark.parametrize("kind", ["tensors", "arrays", "none"])
def test_all_together_is_one_merged_after_the_other(kind: str) -> None:
    tensors = [measured([1.0, 2.0], 2.0), measured([6.0], torch.tensor(1.0)), measured([-4.5], 1.0)]
    arrays = [numpy_measured([0.25]), numpy_measured([3.0, -8.0])]
    parts = {"tensors": tensors, "arrays": arrays, "none": []}[kind]
    one_by_one = reduce(Metrics.merge, parts, Metrics())
    assert Metrics.together(parts).finalize() == one_by_one.finalize()


def test_what_was_measured_on_nothing_is_left_out() -> None:
    nothing = Metrics(
        {("mean",): Sums(torch.zeros(1), torch.tensor(0))},
        {"min": torch.tensor(float("inf"))},
        {"max": torch.tensor(float("-inf"))},
    )
    assert nothing.finalize() == {}
    assert nothing.merge(measured([1.0], 1)).finalize() == pytest.approx(measured([1.0], 1).finalize())


def test_one_mean() -> None:
    parts = measured([1.0, 2.0, 6.0], 3)
    assert parts.mean("twice") == 6.0
    assert parts.mean("missing") is None
    assert measured([0.0], 0).mean("sum") is None
