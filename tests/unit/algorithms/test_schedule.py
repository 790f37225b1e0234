from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms import schedule
from rl_platform.algorithms.schedule import MiniBatches, ShuffleBuffers, mini_batches
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


def test_epochs_take_turns_at_two_copies() -> None:
    """While an epoch is trained on, the next one is written beside it."""
    numbers = torch.Generator().manual_seed(3)
    orders, memory = [], []
    for parts in MiniBatches(_batch(64), 16).epochs(5, lambda _: numbers):
        orders.append(_order(parts))
        memory.append([part.rewards.data_ptr() for part in parts])
        for part in parts:
            assert part.inputs["tokens"].flatten().tolist() == part.group_ids.tolist()
            assert part.rewards.flatten().tolist() == part.group_ids.tolist()
    assert memory[0] == memory[2] == memory[4]
    assert memory[1] == memory[3]
    assert not set(memory[0]) & set(memory[1])
    assert len({tuple(order) for order in orders}) == 5
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_the_rows_being_trained_on_stay_while_the_next_epoch_is_written() -> None:
    """Each epoch's order is asked for in its turn, and the rows of the one before are left alone meanwhile."""
    asked = [threading.Event() for _ in range(4)]

    def orders(epoch: int) -> torch.Generator:
        asked[epoch].set()
        return torch.Generator().manual_seed(epoch)

    alone = [_order(mini_batches(_batch(64), 16, torch.Generator().manual_seed(epoch))) for epoch in range(4)]
    for epoch, parts in enumerate(MiniBatches(_batch(64), 16).epochs(4, orders)):
        before = _order(parts)
        assert epoch == 3 or asked[epoch + 1].wait(60)  # written beside this one
        assert not any(event.is_set() for event in asked[epoch + 2 :])
        assert _order(parts) == before == alone[epoch]


def test_epochs_may_be_left_early() -> None:
    """Nothing is written after that, and the next batch is shuffled as if it were the first."""
    kept, batch = ShuffleBuffers(), _batch(64)
    epochs = MiniBatches(batch, 16, kept).epochs(1000, lambda epoch: torch.Generator().manual_seed(epoch))
    assert len(next(epochs)) == 4
    epochs.close()
    assert kept.thread._work_queue.empty()
    assert sorted(kept.copies[1][0].group_ids.tolist()) == list(range(64))  # the one that was under way is whole
    alone = [_order(mini_batches(batch, 16, torch.Generator().manual_seed(epoch))) for epoch in range(3)]
    again = MiniBatches(batch, 16, kept).epochs(3, lambda epoch: torch.Generator().manual_seed(epoch))
    assert [_order(parts) for parts in again] == alone


def test_copies_serve_the_next_batch_if_it_is_alike() -> None:
    kept, seen = ShuffleBuffers(), [_batch(1)]
    for batch, size, again in (
        (_batch(64), 16, False),
        (replace(_batch(64), group_ids=torch.arange(64) + 100), 16, True),
        (_batch(64), 8, False),  # other mini-batches
        (_batch(32), 8, False),  # fewer rows
        (replace(_batch(32), values=torch.arange(32)[:, None].float()), 8, False),  # one field more
        (replace(_batch(32), returns=torch.arange(32)[:, None].float()), 8, False),  # as many, but another one
    ):
        for parts in MiniBatches(batch, size, kept).epochs(3, lambda epoch: torch.Generator().manual_seed(epoch)):
            assert [len(part) for part in parts] == [size] * (len(batch) // size)
            assert sorted(_order(parts)) == sorted(batch.group_ids.tolist())
            assert all((part.values is None) == (batch.values is None) for part in parts)
            assert all((part.returns is None) == (batch.returns is None) for part in parts)
        assert (kept.copies[0][0] is seen[-1]) == again
        seen.append(kept.copies[0][0])


def test_copies_of_large_batches_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ShuffleBuffers()
    for limit, count in ((2**24, 2), (100, 0)):
        monkeypatch.setattr(schedule, "LARGEST_KEPT", limit)
        for _ in MiniBatches(_batch(64), 16, kept).epochs(3, lambda epoch: torch.Generator().manual_seed(epoch)):
            pass
        assert len(kept.copies) == count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64])
def test_all_kinds_of_numbers_are_shuffled(dtype: torch.dtype) -> None:
    batch = _batch(64)
    batch.inputs["observations"] = torch.arange(64)[:, None, None].expand(64, 1, 3).to(dtype)
    for parts in MiniBatches(batch, 16).epochs(3, lambda epoch: torch.Generator().manual_seed(epoch)):
        for part in parts:
            assert part.inputs["observations"].dtype == dtype
            assert (part.inputs["observations"] == part.group_ids[:, None, None]).all()


def test_what_goes_wrong_in_the_thread_is_raised() -> None:
    def orders(epoch: int) -> torch.Generator:
        raise RuntimeError(f"no order for epoch {epoch}")

    with pytest.raises(RuntimeError, match="no order for epoch 0"):
        next(MiniBatches(_batch(64), 16).epochs(2, orders))
