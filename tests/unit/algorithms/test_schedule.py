from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms.schedule import mini_batches
from rl_platform.errors import ConfigError


@given(size=st.integers(1, 16), count=st.integers(1, 16), seed=st.integers(0, 2**31))
def test_every_row_once_per_epoch(size: int, count: int, seed: int) -> None:
    parts = mini_batches(size * count, size, torch.Generator().manual_seed(seed))
    assert [len(part) for part in parts] == [size] * count
    assert sorted(torch.cat(parts).tolist()) == list(range(size * count))


def test_a_seed_fixes_the_order_and_epochs_differ() -> None:
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first, again = torch.cat(mini_batches(64, 16, one)), torch.cat(mini_batches(64, 16, other))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.cat(mini_batches(64, 16, one)))


@pytest.mark.parametrize(("rows", "size", "nearest"), [(100, 30, 25), (8, 16, 8), (7, 4, 7)])
def test_a_remainder_is_refused_with_the_nearest_size(rows: int, size: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"mini_batch_size(.|\n)*nearest is {nearest}"):
        mini_batches(rows, size, torch.Generator())
