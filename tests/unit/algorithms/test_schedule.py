from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms.schedule import MiniBatches, mini_batches
from rl_platform.errors import ConfigError
from rl_platform.records import RolloutBatch


def _batch(rows: int) -> RolloutBatch:
    """`rows` rows that every field numbers."""
    numbers = torch.arange(rows)
    column = numbers[:, None].float()
    return RolloutBatch(
        inputs={"tokens": numbers[:, None]},
        action_mask=torch.ones(rows, 1, dtype=torch.bool),
        sample_mask=torch.ones(rows, dtype=torch.bool),
        group_ids=numbers,
        rewards=column,
        rollout_log_probs=column,
    )


def _order(parts: list[RolloutBatch]) -> list[int]:
    return torch.cat([part.group_ids for part in parts]).tolist()


@given(size=st.integers(1, 16), count=st.integers(1, 16), seed=st.integers(0, 2**31))
def test_every_row_once_per_epoch(size: int, count: int, seed: int) -> None:
    parts = mini_batches(_batch(size * count), size, torch.Generator().manual_seed(seed))
    assert [len(part) for part in parts] == [size] * count
    assert sorted(_order(parts)) == list(range(size * count))
    for part in parts:  # the fields of a row stay together
        assert part.inputs["tokens"].flatten().tolist() == part.group_ids.tolist()
        assert part.rewards.flatten().tolist() == part.group_ids.tolist()
        assert part.values is None


def test_a_seed_fixes_the_order_and_epochs_differ() -> None:
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first = _order(mini_batches(_batch(64), 16, one))
    assert first == _order(mini_batches(_batch(64), 16, other))
    assert first != _order(mini_batches(_batch(64), 16, one))


def test_without_a_generator_the_rows_keep_their_order() -> None:
    parts = mini_batches(_batch(12), 4, None)
    assert [len(part) for part in parts] == [4, 4, 4]
    assert _order(parts) == list(range(12))


@pytest.mark.parametrize(("rows", "size", "nearest"), [(100, 30, 25), (8, 16, 8), (7, 4, 7)])
def test_a_remainder_is_refused_with_the_nearest_size(rows: int, size: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"mini_batch_size(.|\n)*nearest is {nearest}"):
        mini_batches(_batch(rows), size, torch.Generator())


def test_epochs_share_their_memory_and_not_their_order() -> None:
    numbers, parts = torch.Generator().manual_seed(3), MiniBatches(_batch(64), 16)
    first = parts.epoch(numbers)
    before, memory = _order(first), [part.rewards.data_ptr() for part in first]
    second = parts.epoch(numbers)
    assert [part.rewards.data_ptr() for part in second] == memory
    assert _order(second) != before
    assert sorted(_order(second)) == list(range(64))
    for part in second:
        assert part.inputs["tokens"].flatten().tolist() == part.group_ids.tolist()
        assert part.rewards.flatten().tolist() == part.group_ids.tolist()
