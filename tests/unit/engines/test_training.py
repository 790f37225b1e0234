"""Micro-batches and their independence of results, learning rates, and steps that must not happen."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms.schedule import mini_batches
from rl_platform.config.schema.models import Optim
from rl_platform.engines.training.base import MicroBatches, learning_rate
from rl_platform.engines.training.fsdp import shares
from rl_platform.engines.training.state_files import read, write
from rl_platform.records import RolloutBatch

kinds = pytest.mark.parametrize("kind", ["actor", "critic", "embodied"])
LENGTHS = (5, 17, 9, 3, 30, 6, 4, 9)
LINEAR = Optim(lr=1.0, eps=100.0, clip_grad=None)  # far above the gradient: a step is lr * gradient / eps


def batch_of(lengths: list[int] | None, rows: int) -> RolloutBatch:
    shape = (rows, 4)
    inputs = {"observations": torch.zeros(*shape, 2)} if lengths is None else {"lengths": torch.tensor(lengths)}
    mask = torch.ones(shape, dtype=torch.bool)
    return RolloutBatch(inputs, mask, mask[:, 0], torch.arange(rows), torch.zeros(shape), torch.zeros(shape))


lengths_or_none = st.one_of(st.none(), st.lists(st.integers(1, 60), min_size=1, max_size=40))
limits = st.builds(MicroBatches, st.none() | st.integers(1, 50), st.none() | st.integers(1, 200))


class TestMicroBatches:
    @given(lengths=lengths_or_none, limit=limits, seed=st.integers(0, 9))
    def test_split(self, lengths, limit, seed) -> None:
        count = 7 if lengths is None else len(lengths)
        batch = batch_of(lengths, count)
        rows = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: (count + 1) // 2].tolist()
        parts = limit.split(batch, rows)
        assert sorted(row for part in parts for row in part) == sorted(rows)  # each row exactly once
        for part in parts:
            assert 0 < len(part) <= (limit.rows or count)
            tokens = sum(4 if lengths is None else lengths[row] for row in part)
            assert limit.tokens is None or tokens <= limit.tokens or len(part) == 1

    @given(lengths=lengths_or_none, limit=limits, world_size=st.integers(1, 5))
    def test_shares(self, lengths, limit, world_size) -> None:
        count = 7 if lengths is None else len(lengths)
        batch = batch_of(lengths, count)
        shared = [shares(batch, limit, rank, world_size) for rank in range(world_size)]
        assert sorted(row for share in shared for part in share for row in part) == list(range(count))
        assert len({len(share) for share in shared}) == 1  # collectives match
        rows = [sum(len(part) for part in share) for share in shared]
        assert max(rows) - min(rows) <= 1

    @given(seed=st.integers(0, 9), world_size=st.sampled_from([2, 4]), limit=limits)
    def test_ranks_do_not_change_what_a_mini_batch_holds(self, seed, world_size, limit) -> None:
        numbers = torch.Generator().manual_seed(seed)
        batch = batch_of(torch.randint(1, 60, (24,), generator=numbers).tolist(), 24)
        for mini_batch in mini_batches(batch, 8, numbers):
            ids = mini_batch.group_ids
            shared = [shares(mini_batch, limit, rank, world_size, 64) for rank in range(world_size)]
            row_ids = [int(ids[row]) for share in shared for part in share for row in part]
            assert sorted(row_ids) == sorted(ids.tolist())

    def test_ranks_get_rows_of_similar_cost_or_in_order(self) -> None:
        lengths = [512, 40, 300, 300, 256, 256, 100, 60]
        batch = batch_of(lengths, 8)
        balanced, cut = (
            [shares(batch, MicroBatches(), rank, 2, 4096, balance)[0] for rank in range(2)] for balance in (True, False)
        )
        assert max(sum(lengths[row] for row in rows) for rows in balanced) <= 916
        assert [sorted(rows) for rows in cut] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    @pytest.mark.parametrize(
        ("limit", "lengths", "expected"),
        [
            (MicroBatches(rows=2), [9, 1, 8, 2], [[1, 3], [2, 0]]),  # neighbours of similar length
            (MicroBatches(tokens=10), [30, 4, 4, 4], [[1, 2], [3], [0]]),  # a row over the budget stands alone
            (MicroBatches(), [], []),
            (MicroBatches(tokens=3), [], []),
        ],
    )
    def test_examples(self, limit: MicroBatches, lengths: list[int], expected: list[list[int]]) -> None:
        assert limit.split(batch_of(lengths or [1, 2], len(lengths) or 2), range(len(lengths))) == expected


COSINE = [0.1 + 0.45 * (1 + math.cos(math.pi * done / 6)) for done in range(7)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1.0] * 11),
        ({"lr_warmup_steps": 4}, [0.25, 0.5, 0.75] + [1.0] * 8),
        ({"lr_schedule": "linear", "min_lr": 0.2}, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2]),
        ({"lr_schedule": "cosine", "lr_warmup_steps": 2, "min_lr": 0.1}, [0.5, 1.0, *COSINE, 0.1, 0.1]),
    ],
)
def test_learning_rates_of_eight_steps_and_three_more(options: dict[str, Any], expected: list[float]) -> None:
    optim = Optim(lr=1.0, **options)
    assert [learning_rate(optim, step, 8) for step in range(11)] == pytest.approx(expected)


class TestStep:
    @kinds
    @pytest.mark.parametrize("limit", [MicroBatches(rows=1), MicroBatches(rows=2), MicroBatches(tokens=30)], ids=str)
    def test_micro_batches_change_nothing(self, ranks: ModuleType, kind: str, limit: MicroBatches) -> None:
        batch = ranks.batch(kind, lengths=LENGTHS)
        assert not batch.mask[1].any()  # a row that does not count
        results = []
        for micro_batches in (MicroBatches(), limit):
            engine = ranks.engine(kind, LINEAR)
            metrics = engine.step(batch, ranks.loss(kind), micro_batches)
            results.append((ranks.parameters(engine), metrics.finalize()))
        (expected, expected_metrics), (actual, metrics) = results
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-6, atol=5e-7)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)

    @kinds
    def test_rows_that_do_not_count_might_as_well_be_absent(self, ranks: ModuleType, kind: str) -> None:
        batch = ranks.batch(kind, lengths=LENGTHS)
        batch.advantages[1] = batch.returns[1] = float("nan")
        results = []
        for rows in ([0, 2, 3, 4, 5, 6, 7], range(8)):
            engine = ranks.engine(kind, LINEAR)
            engine.step(batch.select(torch.tensor(rows)), ranks.loss(kind), MicroBatches(rows=3))
            results.append(ranks.parameters(engine))
        for name, tensor in results[0].items():
            torch.testing.assert_close(results[1][name], tensor, rtol=1e-6, atol=5e-7)

    def test_a_long_gradient_is_clipped(self, ranks: ModuleType) -> None:
        results = []
        for clip in (None, 1e-3):
            engine = ranks.engine("critic", LINEAR.model_copy(update={"clip_grad": clip}))
            metrics = engine.step(ranks.batch("critic"), ranks.loss("critic"), MicroBatches())
            head = engine.weights()["model.head.weight"]  # was 0
            results.append((metrics.finalize()["grad_norm"], head.norm().item()))
        (norm, free), (clipped_norm, clipped) = results
        assert norm == clipped_norm > 0.1  # as it was before clipping
        assert clipped == pytest.approx(free * 1e-3 / norm, rel=5e-2)

    def test_learning_rate(self, ranks: ModuleType) -> None:
        engine = ranks.engine("embodied", Optim(lr=1e-2))
        before = ranks.parameters(engine)
        engine.set_learning_rate(1e-30)
        engine.step(ranks.batch("embodied"), ranks.loss("embodied"), MicroBatches())
        for name, tensor in ranks.parameters(engine).items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-20)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @kinds
    def test_a_step_that_is_not_finite_does_not_happen(self, ranks: ModuleType, kind: str, value: float) -> None:
        engine = ranks.engine(kind)
        ranks.steps(engine, kind, 0, 2)
        before = ranks.tensors(engine)
        batch = ranks.batch(kind)
        batch.advantages[2] = batch.returns[2] = value
        assert engine.step(batch, ranks.loss(kind), MicroBatches(rows=2)) is None
        after = ranks.tensors(engine)
        assert len(before) == 4 * len(engine.parameters)  # parameter, two moments, count
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert all(parameter.grad is None for parameter in engine.parameters)

    def test_on_a_cpu_moments_exist_before_the_first_forward_pass(self, ranks: ModuleType) -> None:
        engine, seen = ranks.engine("actor"), []
        engine.model.register_forward_pre_hook(lambda *_: seen.append(len(engine.optimizer.state)))
        ranks.steps(engine, "actor", 0, 1)
        assert seen[0] == len(engine.parameters)

    def test_weights_are_the_live_parameters(self, ranks: ModuleType) -> None:
        engine = ranks.engine("actor")
        weights = engine.weights()
        assert not any(tensor.requires_grad for tensor in weights.values())
        before = {name: tensor.clone() for name, tensor in weights.items()}
        ranks.steps(engine, "actor", 0, 1)
        assert not any(torch.equal(before[name], weights[name]) for name in before)
        tied = [weights["model.head.weight"].data_ptr(), weights["model.backbone.embed_tokens.weight"].data_ptr()]
        assert tied[0] == tied[1]

    @kinds
    def test_resuming_is_exact(self, ranks: ModuleType, kind: str, tmp_path: Path) -> None:
        engine = ranks.engine(kind)
        ranks.steps(engine, kind, 0, 2)
        write(engine.sharded_state(), tmp_path)
        undisturbed = ranks.steps(engine, kind, 2, 4)
        other = ranks.engine(kind)
        read(other.sharded_state(), tmp_path)
        assert ranks.steps(other, kind, 2, 4) == undisturbed
        assert all(torch.equal(*pair) for pair in zip(ranks.tensors(engine), ranks.tensors(other), strict=True))


def test_half_precision_keeps_float32_parameters(ranks: ModuleType) -> None:
    from rl_platform.engines.training.fsdp import FSDPEngine

    exact = ranks.engine("actor")
    engine = FSDPEngine(ranks.model("actor"), ranks.OPTIM, dtype=torch.bfloat16, horizon=32, device=torch.device("cpu"))
    actual, expected = ranks.outputs(engine, "actor")["log_probs"], ranks.outputs(exact, "actor")["log_probs"]
    assert actual.dtype == torch.float32
    assert 0 < float((actual - expected).abs().max()) < 0.05
    assert ranks.steps(engine, "actor", 0, 1)[0] is not None
    assert {tensor.dtype for tensor in ranks.tensors(engine)} == {torch.float32}
