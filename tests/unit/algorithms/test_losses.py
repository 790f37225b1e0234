"""The losses that engines call: terms, denominators and invariances together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators, aggregate
from rl_platform.algorithms.losses import ModelOutputs, actor_critic_loss, actor_loss
from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.policy_losses import ppo_clip
from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
ALL_TERMS: dict[str, Any] = {
    "loss_type": "actor_critic",
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 3.0,
    "entropy_bonus": 0.01,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "positive_nll_coef": 0.1,
    "value_clip": 0.2,
    "huber_delta": 0.7,
    "value_loss_scale": 0.5,
}


def rows(*numbers: list[float]) -> Tensor:
    width = max(map(len, numbers))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in numbers])


def random_case(seed: int, shape: tuple[int, int] = (6, 5)) -> tuple[dict[str, Tensor], RolloutBatch]:
    """Model outputs and a mini-batch with one fully masked row and a row that does not count."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(shape, generator=generator) < 0.6
    mask[2] = False
    mask[0, 0] = True
    old = draw() - 2
    batch = neutral_batch(
        mask, log_probs=old, reference_log_probs=old + draw(0.3), values=draw(), advantages=draw(), returns=draw()
    )
    batch.sample_mask[4] = False
    batch.correct = torch.rand(shape[0], generator=generator) < 0.5
    batch.loss_weights = torch.rand(shape, generator=generator) * 2
    outputs = {"log_probs": old + draw(0.5), "entropy": draw().abs(), "values": draw()}
    return outputs, batch


def run(
    outputs: dict[str, Tensor], batch: RolloutBatch, algorithm: Algorithm, parts: list[list[int]]
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients per model output and metrics of a mini-batch computed in the given micro-batches."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in outputs.items()}
    denominators = Denominators.of(batch.mask, horizon=8, correct=batch.correct)
    total, metrics = 0.0, Metrics()
    for part in parts:
        index = torch.tensor(part)
        selected = ModelOutputs(**{name: leaf.index_select(0, index) for name, leaf in leaves.items()})
        loss, measured = actor_critic_loss(selected, batch.select(index), denominators, algorithm)
        loss.backward()
        total, metrics = total + loss.item(), metrics.merge(measured)
    return total, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, metrics.finalize()


def assert_same(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    assert one[0] == pytest.approx(other[0], rel=tolerance * 10, abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], rtol=tolerance * 10, atol=tolerance)
    assert one[2] == pytest.approx(other[2], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 5)), order=st.permutations(range(6)))
def test_micro_batches_change_nothing(mode: str, seed: int, cuts: set[int], order: list[int]) -> None:
    """Every split and order, all terms, with a fully masked row that may be a micro-batch of its own."""
    outputs, batch = random_case(seed)
    algorithm = Algorithm(**ALL_TERMS, loss_agg_func=mode)
    edges = [0, *sorted(cuts), 6]
    parts = [order[start:end] for start, end in itertools.pairwise(edges)]
    assert_same(run(outputs, batch, algorithm, parts), run(outputs, batch, algorithm, [list(range(6))]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("garbage", [float("nan"), 50.0])
def test_gaps_and_padding_change_nothing(mode: str, garbage: float) -> None:
    """Observation tokens in the middle, padding on both sides: any content, same loss, gradients and metrics."""
    outputs, batch = random_case(11)
    algorithm = Algorithm(**ALL_TERMS, loss_agg_func=mode)
    places = torch.tensor([1, 2, 5, 6, 8])

    def widen(tensor: Tensor) -> Tensor:
        wide = (
            torch.full((6, 10), garbage, dtype=tensor.dtype)
            if tensor.is_floating_point()
            else torch.zeros(6, 10, dtype=tensor.dtype)
        )
        wide[:, places] = tensor
        return wide

    wide_outputs = {name: widen(tensor) for name, tensor in outputs.items()}
    wide_fields = {
        field.name: widen(value)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.dim() == 2
    }
    wide_batch = dataclasses.replace(batch, **wide_fields)
    narrow = run(outputs, batch, algorithm, [list(range(6))])
    wide = run(wide_outputs, wide_batch, algorithm, [list(range(6))])
    outside = torch.ones(10, dtype=torch.bool)
    outside[places] = False
    assert all(not gradient[:, outside].any() for gradient in wide[1].values())
    assert_same((wide[0], {name: gradient[:, places] for name, gradient in wide[1].items()}, wide[2]), narrow)


def test_full_masks_take_the_same_values_as_masked_code() -> None:
    """A batch without gaps skips the guards; one extra masked row forces them. Nothing else may differ."""
    outputs, batch = random_case(3, (6, 1))
    batch.action_mask[:], batch.sample_mask[:] = True, True
    algorithm = Algorithm(**ALL_TERMS)
    dense = run(outputs, batch, algorithm, [list(range(6))])
    padded_outputs = {name: torch.cat((tensor, tensor[:1])) for name, tensor in outputs.items()}
    padded_batch = batch.select(torch.tensor([0, 1, 2, 3, 4, 5, 0]))
    padded_batch.sample_mask[6] = False
    guarded = run(padded_outputs, padded_batch, algorithm, [list(range(7))])
    assert_same((guarded[0], {name: gradient[:6] for name, gradient in guarded[1].items()}, guarded[2]), dense)


END_TO_END = {
    "mask": rows([1, 1, 1, 0], [1, 1], [1]).bool(),
    "old": rows([-1, -2, -0.5, 0], [-1.5, -0.7], [-3]),
    "step": rows([0.3, -0.3, 0.05, 0], [1.5, -0.4], [0.1]),
    "mismatch": rows([0.2, -1, 0, 0], [0.1, 0.9], [-0.2]),
    "drift": rows([0.1, -0.2, 0.4, 0], [0, 0.5], [-0.3]),
    "advantages": rows([1, 1, 1, 0], [-1, -1], [2]),
    "entropy": rows([0.5, 0.6, 0.7, 0], [1, 1.1], [0.2]),
}


def end_to_end() -> tuple[Tensor, RolloutBatch]:
    log_probs = (END_TO_END["old"] + END_TO_END["step"]).requires_grad_()
    batch = neutral_batch(
        END_TO_END["mask"],
        log_probs=END_TO_END["old"],
        reference_log_probs=log_probs.detach() - END_TO_END["drift"],
        advantages=END_TO_END["advantages"],
    )
    return log_probs, batch


def test_end_to_end_golden_of_the_actor() -> None:
    log_probs, batch = end_to_end()
    algorithm = Algorithm(
        clip_ratio_high=0.28, clip_ratio_c=3.0, use_kl_loss=True, kl_loss_coef=0.1, entropy_bonus=0.01
    )
    loss, metrics = actor_loss(
        ModelOutputs(log_probs, entropy=END_TO_END["entropy"]), batch, Denominators.of(batch.mask, 4), algorithm
    )
    summary = metrics.finalize()
    expected = {
        "actor/pg_loss": (-1.28 - 0.740818 - 1.051271 + 3 + 0.8 - 2.210342) / 6,
        "actor/kl_loss": 0.042158,
        "actor/entropy": 0.683333,
        "actor/clip_frac": 1 / 3,
        "actor/dual_clip_frac": 1 / 6,
        "actor/approx_kl": -0.208333,
        "actor/ratio_min": 0.670320,
        "actor/ratio_max": 4.481689,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    total = expected["actor/pg_loss"] + 0.1 * 0.042158 - 0.01 * 0.683333
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert summary["actor/loss"] == pytest.approx(loss.item())


CORRECTED: dict[str, Any] = {
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 3.0,
    "entropy_bonus": 0.01,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "positive_nll_coef": 0.1,
    "rollout_is": {"high": 2.0},
}


def corrected_end_to_end(algorithm: Algorithm, parts: list[list[int]]) -> tuple[float, Tensor, dict[str, float]]:
    """Weights (at most 2) multiply the clipped loss; correct sequences 0 and 2 add their negative log-likelihood."""
    log_probs, batch = end_to_end()
    assert batch.log_probs is not None
    assert algorithm.rollout_is is not None
    batch.correct = torch.tensor([True, False, True])
    batch.rollout_log_probs = batch.log_probs - END_TO_END["mismatch"]
    batch.loss_weights, _ = mismatch_weights(batch.log_probs, batch.rollout_log_probs, batch.mask, algorithm.rollout_is)
    denominators = Denominators.of(batch.mask, 4, batch.correct)
    total, metrics = 0.0, Metrics()
    for part in parts:
        index = torch.tensor(part)
        outputs = ModelOutputs(log_probs.index_select(0, index), END_TO_END["entropy"].index_select(0, index))
        loss, measured = actor_loss(outputs, batch.select(index), denominators, algorithm)
        loss.backward()
        total, metrics = total + loss.item(), metrics.merge(measured)
    assert log_probs.grad is not None
    return total, log_probs.grad, metrics.finalize()


SPLITS = [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[1, 2], [0]]]


@pytest.mark.parametrize("parts", SPLITS, ids=str)
def test_end_to_end_golden_with_mismatch_weights_and_positive_examples(parts: list[list[int]]) -> None:
    loss, gradient, metrics = corrected_end_to_end(Algorithm(**CORRECTED), parts)
    expected = {
        "actor/pg_loss": 0.036440,
        "actor/kl_loss": 0.042158,
        "actor/entropy": 0.683333,
        "actor/positive_nll": 1.5875,
        "actor/loss": 0.192572,
        "actor/clip_frac": 1 / 3,
        "actor/dual_clip_frac": 1 / 6,
        "actor/approx_kl": -0.208333,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert loss == pytest.approx(0.192572, rel=1e-5)
    expected_gradient = rows([-0.023414, -0.074112, -0.194717, 0], [0, 0.006558], [-0.332443])
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", SPLITS, ids=str)
@pytest.mark.parametrize(
    ("mode", "expected"), [*zip(MODES, [0.036440, 0.072880, -0.104773, 0.018220, 0.218640], strict=True)]
)
def test_end_to_end_golden_of_every_aggregation(mode: str, expected: float, parts: list[list[int]]) -> None:
    horizon = {"loss_agg_horizon": 4} if mode.endswith("norm") else {}
    metrics = corrected_end_to_end(Algorithm(**CORRECTED, loss_agg_func=mode, **horizon), parts)[2]
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metrics["actor/positive_nll"] == pytest.approx(1.5875, rel=1e-5)  # per token of correct rows in every mode


def test_end_to_end_golden_per_sequence_and_per_position() -> None:
    log_probs, batch = end_to_end()
    algorithm = Algorithm(**CORRECTED)
    assert batch.log_probs is not None
    assert batch.advantages is not None
    assert algorithm.rollout_is is not None
    per_token, _ = ppo_clip(log_probs, batch.log_probs, batch.advantages, batch.mask, algorithm)
    clipped = rows([-1.28, -0.740818, -1.051271, 0], [3, 0.8], [-2.210342])
    torch.testing.assert_close(per_token.detach(), clipped, rtol=1e-5, atol=1e-6)
    weights, _ = mismatch_weights(
        batch.log_probs, batch.log_probs - END_TO_END["mismatch"], batch.mask, algorithm.rollout_is
    )
    expected = rows([1.221403, 0.367879, 1, 0], [1.105171, 2], [0.818731])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    weighted = rows([-1.563396, -0.272532, -1.051271, 0], [3.315513, 1.6], [-1.809675])
    torch.testing.assert_close(per_token.detach() * weights, weighted, rtol=1e-5, atol=1e-6)
    denominators = Denominators.of(batch.mask, 4)
    for row, part in enumerate([-0.481200, 0.819252, -0.301612]):
        found = aggregate((per_token * weights)[row : row + 1], batch.mask[row : row + 1], denominators, "token-mean")
        assert found.item() == pytest.approx(part, rel=1e-5, abs=1e-6)


def test_weights_multiply_the_policy_loss_and_nothing_else() -> None:
    outputs, batch = random_case(2)
    algorithm = Algorithm(**{**ALL_TERMS, "loss_type": "actor", "positive_nll_coef": 0.3})
    batch.correct = torch.tensor([True, True, False, False, True, True])
    denominators = Denominators.of(batch.mask, 8, batch.correct)

    def metrics() -> dict[str, float]:
        return actor_loss(ModelOutputs(**outputs), batch, denominators, algorithm)[1].finalize()

    plain = metrics()
    batch.loss_weights = torch.zeros(batch.mask.shape)
    weighted = metrics()
    assert weighted["actor/pg_loss"] == 0
    rest = plain["actor/loss"] - plain["actor/pg_loss"]
    assert weighted["actor/loss"] == pytest.approx(rest, rel=1e-5)
    others = plain.keys() - {"actor/pg_loss", "actor/loss"}
    assert {name: weighted[name] for name in others} == {name: plain[name] for name in others}


def test_entropy_without_a_bonus_is_measured_but_not_differentiated() -> None:
    log_probs, batch = end_to_end()
    entropy = END_TO_END["entropy"].clone().requires_grad_()
    denominators = Denominators.of(batch.mask, 4)
    loss, metrics = actor_loss(ModelOutputs(log_probs, entropy), batch, denominators, Algorithm())
    loss.backward()
    assert entropy.grad is None
    assert metrics.finalize()["actor/entropy"] == pytest.approx(0.683333, rel=1e-5)
    plain, plain_metrics = actor_loss(ModelOutputs(log_probs), batch, denominators, Algorithm())
    assert plain.item() == loss.item()
    assert "actor/entropy" not in plain_metrics.finalize()


@pytest.mark.parametrize(("clip", "value", "gradient"), [(None, 16.085537, -19.085537), (10.0, 10.0, 0.0)])
def test_bound_of_k3_in_the_loss(clip: float | None, value: float, gradient: float) -> None:
    """One token whose log-prob lies 3 below the reference's; no advantage, so that the KL is all there is."""
    mask, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1)
    rows = torch.zeros(1, dtype=torch.int64)
    batch = RolloutBatch({}, mask, mask[:, 0], rows, zero, zero, log_probs=zero - 4, advantages=zero)
    batch.reference_log_probs = zero - 1
    log_probs = (zero - 4).requires_grad_()
    algorithm = Algorithm(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_output_clip=clip)
    loss, _ = actor_loss(ModelOutputs(log_probs), batch, Denominators.of(mask, 1), algorithm)
    loss.backward()
    assert log_probs.grad is not None
    assert (loss.item(), log_probs.grad.item()) == pytest.approx((value, gradient), rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "gradient"),
    [
        ({}, 1 - math.exp(-0.4)),
        ({"kl_loss_type": "k3+"}, 0.4),
        ({"kl_loss_grad": "k2"}, 0.4),
        ({"kl_loss_type": "k1", "kl_loss_grad": "score"}, math.exp(0.05) * (0.4 + 1)),
    ],
    ids=["plain", "plus", "k2", "score"],
)
def test_gradient_of_the_kl_term(keys: dict[str, Any], gradient: float) -> None:
    """On the third token of row 0: drift 0.4 from the reference, 0.05 from the old policy."""
    log_probs, batch = end_to_end()
    found = []
    for coefficient in (0.0, 1.0):
        algorithm = Algorithm(use_kl_loss=True, kl_loss_coef=coefficient, **keys)
        loss, _ = actor_loss(ModelOutputs(log_probs), batch, Denominators.of(batch.mask, 4), algorithm)
        found.append(torch.autograd.grad(loss, log_probs)[0])
    assert (found[1] - found[0])[0, 2].item() == pytest.approx(gradient / 6, rel=1e-4)


def test_full_kl_of_the_model_is_a_term_of_the_loss() -> None:
    log_probs, batch = end_to_end()
    kl = torch.full((3, 4), 0.5).masked_fill(~batch.mask, math.nan).requires_grad_()
    algorithm = Algorithm(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="full")
    loss, metrics = actor_loss(ModelOutputs(log_probs, full_kl=kl), batch, Denominators.of(batch.mask, 4), algorithm)
    loss.backward()
    torch.testing.assert_close(kl.grad, 0.1 / 6 * batch.mask.float())
    assert metrics.finalize()["actor/kl_loss"] == pytest.approx(0.5)


def test_losses_match_finite_differences() -> None:
    outputs, batch = random_case(7)
    algorithm = Algorithm(**ALL_TERMS)
    leaves = [tensor.double().requires_grad_() for tensor in outputs.values()]
    denominators = Denominators.of(batch.mask, 5)
    assert torch.autograd.gradcheck(
        lambda *tensors: actor_critic_loss(ModelOutputs(*tensors), batch, denominators, algorithm)[0], leaves
    )
