from __future__ import annotations

import pytest
import torch

from rl_platform.algorithms.aggregation import Denominators, aggregate

LOSS = torch.tensor([[1.0, 0, 0, 0], [2, 2, 2, 2], [3, 3, 0, 0], [9, 9, 9, 9]])
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
GOLDENS = {
    "token-mean": 15 / 7,
    "seq-mean-token-sum": 5.0,
    "seq-mean-token-mean": 2.0,
    "seq-mean-token-sum-norm": 1.25,
    "token-sum": 15.0,
}
NOMINAL = {"seq-mean-token-sum": 3.75, "seq-mean-token-mean": 1.5, "seq-mean-token-sum-norm": 0.9375}
SPLITS = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0, 2], [1]], [[3], [2, 0, 1]]]


def test_denominators_count_the_whole_mini_batch() -> None:
    assert Denominators.of(MASK, horizon=4) == Denominators(tokens=7.0, sequences=3.0, horizon=4.0)
    everything = Denominators.of(torch.ones_like(MASK), horizon=4)
    assert everything == Denominators(MASK.numel(), len(MASK), horizon=4.0, full=True)


@pytest.mark.parametrize(
    ("nominal", "mode"), [*((False, mode) for mode in GOLDENS), *((True, mode) for mode in NOMINAL)]
)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_into_micro_batches_sums_to_the_golden(nominal: bool, mode: str, split: list[list[int]]) -> None:
    """Nominal denominators count the masked row too."""
    denominators = Denominators.of(MASK, horizon=4, nominal=nominal)
    parts = [aggregate(LOSS[rows], MASK[rows], denominators, mode) for rows in split]
    assert sum(float(part) for part in parts) == pytest.approx((NOMINAL if nominal else GOLDENS)[mode], rel=1e-6)


@pytest.mark.parametrize("mode", GOLDENS)
def test_no_mask_means_every_position(mode: str) -> None:
    full = torch.ones_like(MASK)
    denominators = Denominators.of(full, horizon=4)
    torch.testing.assert_close(aggregate(LOSS, None, denominators, mode), aggregate(LOSS, full, denominators, mode))


def test_rows_cut_across_parts_need_their_whole_length() -> None:
    denominators = Denominators.of(MASK, horizon=4)
    lengths = MASK.sum(dim=1)
    halves = [
        aggregate(LOSS[:, part], MASK[:, part], denominators, "seq-mean-token-mean", lengths)
        for part in (slice(0, 2), slice(2, 4))
    ]
    assert float(halves[0] + halves[1]) == pytest.approx(2.0)


@pytest.mark.parametrize("mode", GOLDENS)
@pytest.mark.parametrize("mini_batch_is_empty", [True, False])
def test_a_fully_masked_micro_batch_gives_zero_with_a_graph(mode: str, mini_batch_is_empty: bool) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    denominators = Denominators.of(mask if mini_batch_is_empty else MASK, horizon=3)
    part = aggregate(loss, mask, denominators, mode)
    part.backward()
    assert part == 0
    assert loss.grad is not None
    assert not loss.grad.any()
