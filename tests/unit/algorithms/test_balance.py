from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms.balance import balance_metrics, balanced_parts, contiguous_parts, sequence_cost


def sums(costs: list[int], parts: list[list[int]]) -> list[int]:
    return sorted((sum(costs[index] for index in part) for part in parts), reverse=True)


@pytest.mark.parametrize(
    ("costs", "count", "largest"),
    [
        ([8, 7, 6, 5, 4], 2, 16),
        ([10, 9, 8, 7, 6, 5, 4, 3], 4, 13),
        ([512, 40, 300, 300, 256, 256, 100, 60], 2, 916),  # contiguous halves: 1152
    ],
)
def test_goldens(costs: list[int], count: int, largest: int) -> None:
    parts = balanced_parts(costs, count)
    assert sums(costs, parts)[0] <= largest
    assert sum(sums(costs, parts)) == sum(costs)


def test_metrics() -> None:
    """Work without the hidden size is the square of the length: halves of 25 + 16 and 1 + 4, or 25 + 1 and 16 + 4."""
    lengths = [5, 4, 1, 2]
    found = balance_metrics(lengths, [[0, 2], [1, 3]], hidden_size=0)
    expected = {
        "balance/min": 6.0,
        "balance/mean": 6.0,
        "balance/max": 6.0,
        "balance/before_max": 41 / 23,
        "balance/after_max": 26 / 23,
        "balance/imbalance": 1 - 23 / 26,
    }
    assert found == pytest.approx(expected)


@given(count=st.integers(0, 50), parts=st.integers(1, 9))
def test_contiguous_parts(count: int, parts: int) -> None:
    found = contiguous_parts(count, parts)
    assert [row for part in found for row in part] == list(range(count))
    sizes = [len(part) for part in found]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@given(costs=st.lists(st.integers(0, 10_000), max_size=60), count=st.integers(1, 9))
def test_every_index_once_and_equal_counts(costs: list[int], count: int) -> None:
    parts = balanced_parts(costs, count)
    assert len(parts) == count
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert parts == balanced_parts(costs, count)
    # moved at most one of the largest numbers away from the best possible
    assert sums(costs, parts)[0] - sums(costs, parts)[-1] <= max(costs, default=0)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_better_than_dealing_out_the_sorted_rows(count: int) -> None:
    numbers = torch.Generator().manual_seed(count)
    lengths = (torch.rand(64, generator=numbers) ** 3 * 4000).int().add(50).tolist()
    costs = [sequence_cost(length, 896) for length in lengths]
    order = sorted(range(64), key=costs.__getitem__)
    dealt = sums(costs, [order[start::count] for start in range(count)])
    found = sums(costs, balanced_parts(costs, count))
    mean = sum(costs) / count
    assert dealt[0] / mean > 1.02
    assert found[0] / mean < 1.01


def test_cost() -> None:
    assert sequence_cost(10, 4096) == 24576 * 10 + 100
