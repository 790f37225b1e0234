"""The kinds of policy loss beside the clipped one, the user's own, and the likelihood of correct examples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators, aggregate
from rl_platform.algorithms.losses import ModelOutputs, actor_loss
from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.policy_losses import policy_loss_function, ppo_clip
from rl_platform.algorithms.variants import policy_loss_kinds
from rl_platform.algorithms.variants.positive_nll import positive_nll
from rl_platform.algorithms.variants.user_policy_loss import TAKEN
from rl_platform.config.schema.algorithm import POLICY_LOSSES, Algorithm, LossAggregation
from rl_platform.errors import ConfigError
from rl_platform.launch.tools.report.definitions import definitions
from rl_platform.records import RolloutBatch

EXAMPLE = Path(__file__).parents[3] / "examples" / "policy_loss.py"
MASK = torch.tensor([[True, True, True, False], [True, True, False, False], [False] * 4])
OLD = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) - 0.5
STEP = torch.tensor([[0.1, -0.3, 0.5, 0.0], [0.4, 0.6, 0.0, 0.0], [0.0] * 4])
ADVANTAGES = torch.tensor([[1.0, -2.0, 0.5, 0.0], [2.0, 3.0, 0.0, 0.0], [1.0] * 4])
CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}

KINDS = {"ppo_clip": ppo_clip, **policy_loss_kinds.KINDS}


def run(kind: str, mask: Tensor | None = MASK, **keys: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Losses and gradients of their sum per position, and metrics."""
    log_probs = (OLD + STEP).requires_grad_()
    loss, metrics = policy_loss_function(kind)(log_probs, OLD, ADVANTAGES, mask, Algorithm(policy_loss=kind, **keys))
    loss.sum().backward()
    assert log_probs.grad is not None
    return loss.detach(), log_probs.grad, metrics.finalize()


def make_batch(mask: Tensor, **fields: Tensor) -> RolloutBatch:
    zeros, rows = torch.zeros(mask.shape), torch.arange(len(mask))
    return RolloutBatch({}, mask, rows >= 0, rows, zeros, zeros, **fields)


def test_the_config_knows_the_same_kinds() -> None:
    assert tuple(KINDS) == POLICY_LOSSES


def test_sequence_ratio() -> None:
    """Log-ratios .1, -.3, .5: exp(.1) = 1.105171 at every position, inside the bounds. Row 1 is exp(.5), above."""
    loss, gradient, metrics = run("gspo", **CLIP)
    torch.testing.assert_close(loss[0], -ADVANTAGES[0] * 1.105171, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss[1], torch.tensor([-2.56, -3.84, 0, 0]))
    mean_advantage = ADVANTAGES[0, :3].mean().item()
    expected = torch.where(MASK[0], -mean_advantage * 1.105171, 0.0)  # each position moves the ratio of all three
    torch.testing.assert_close(gradient[0], expected, rtol=1e-5, atol=1e-6)
    assert not gradient[1:].any()
    assert metrics["actor/clip_frac"] == metrics["actor/clip_frac_high"] == pytest.approx(2 / 5)
    assert metrics["actor/ratio_min"] == pytest.approx(1.105171, rel=1e-5)


def test_sequence_ratio_with_a_gradient_per_token() -> None:
    """The losses of gspo. Row 0: the derivative of -A s is -A_t s at each position, not the row's mean of it."""
    loss, gradient, metrics = run("gspo_token", **CLIP)
    torch.testing.assert_close(loss, run("gspo", **CLIP)[0])
    torch.testing.assert_close(gradient[0], -ADVANTAGES[0] * 1.105171, rtol=1e-5, atol=1e-6)
    assert not gradient[1:].any()  # clipped
    assert metrics["actor/clip_frac"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("mode", get_args(LossAggregation))
def test_both_sequence_ratios_agree_where_a_row_has_one_advantage(mode: str) -> None:
    """GSPO, section 4.3: with one advantage per row, GSPO-token has the loss and the gradient of GSPO."""
    advantages = torch.tensor([[-1.5], [0.7], [1.0]]).expand(3, 4)
    results = []
    for kind in ("gspo", "gspo_token"):
        log_probs = (OLD + 0.3 * STEP).requires_grad_()
        losses, _ = policy_loss_function(kind)(log_probs, OLD, advantages, MASK, Algorithm(policy_loss=kind, **CLIP))
        loss = aggregate(losses, MASK, Denominators.of(MASK, 4), mode)
        loss.backward()
        results.append((loss.detach(), log_probs.grad))
    torch.testing.assert_close(*results)
    assert results[0][1].count_nonzero() == MASK.sum()


def test_geometric_mean_of_clipped_ratios() -> None:
    """Bounds -.2 and .28 of log rho.

    Row 0, log rho .1 (A 1), -.3 (A -2), .5 (A .5): .1, -.2 (clipped below), .28 (clipped above): mean .06, and
    exp(.06) = 1.061837.
    Row 1, log rho .4 and .6, A > 0: both .28: exp(.28) = 1.323130, no gradient.
    A clipped position has no gradient. The row's derivative is the mean of -A_t, (-1 + 2 - .5) / 3 times 1.061837, at
    the one position that is not clipped; the sum over three positions undoes the division.
    """
    loss, gradient, metrics = run("gmpo", **CLIP)
    torch.testing.assert_close(loss[0], -ADVANTAGES[0] * 1.061837, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss[1], torch.tensor([-2.646260, -3.969389, 0, 0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient[0], torch.tensor([0.5 / 3 * 1.061837, 0, 0, 0]), rtol=1e-5, atol=1e-6)
    assert not gradient[1:].any()
    assert metrics["actor/clip_frac_high"] == pytest.approx(3 / 5)
    assert metrics["actor/clip_frac_low"] == pytest.approx(1 / 5)


def test_soft_gate() -> None:
    """tau 1 (A > 0) and 2 (A < 0). rho = 1: -A (4 / tau) / 2, gradient -A.

    rho = 1 + ln 3, tau 1: sigmoid(ln 3) = 3/4, so -A 4 (3/4) = -3 A, gradient -A 4 (3/4) (1/4) rho = -.75 A rho.
    rho = 1 + ln 3 / 2, tau 2: the same gate, -A 2 (3/4) = -1.5 A.
    """
    third = 1.0986123
    ratio = torch.tensor([[1.0, 1.0, 1 + third, 1 + third / 2]], dtype=torch.float64)
    advantages = torch.tensor([[2.0, -1.0, 3.0, -2.0]], dtype=torch.float64)
    log_probs, old = ratio.log().requires_grad_(), torch.zeros(1, 4, dtype=torch.float64)
    algorithm = Algorithm(policy_loss="sapo", sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    loss, _ = KINDS["sapo"](log_probs, old, advantages, None, algorithm)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-4.0, 1.0, -9.0, 3.0])
    expected = [-2.0, 1.0, -0.75 * 3 * (1 + third), 0.75 * 2 * (1 + third / 2)]
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx(expected)


def test_sequence_ratio_of_rows_without_gaps() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    for one, other in zip(run("gspo", mask, **CLIP)[:2], run("gspo", None, **CLIP)[:2], strict=True):
        torch.testing.assert_close(one, other)


def test_sequence_ratio_of_single_tokens_is_the_clipped_loss() -> None:
    numbers = torch.Generator().manual_seed(1)
    log_probs, old, advantages = (torch.randn(50, 1, generator=numbers) for _ in range(3))
    both = [
        KINDS[kind](log_probs, old, advantages, None, Algorithm(clip_ratio_c=3.0))[0] for kind in ("gspo", "ppo_clip")
    ]
    torch.testing.assert_close(*both)


def test_clipped_weight() -> None:
    """Outside the bounds the weight stops, the gradient does not: it is always weight * A."""
    loss, gradient, metrics = run("cispo", **CLIP)
    weights = STEP.exp().clamp(0.8, 1.28)
    expected = torch.where(MASK, -weights * ADVANTAGES, 0.0)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(loss, expected * (OLD + STEP))
    assert metrics["actor/clip_frac_high"] == pytest.approx(3 / 5)  # .5, .4 and .6 are above log 1.28
    assert metrics["actor/clip_frac_low"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_bounded_divergence(kind: str) -> None:
    """Thresholds 0.2 (A < 0) and 0.28 (A > 0) in total variation, 0.1 and 0.2 in KL.

    pi_old .5 -> pi .8: TV .3, KL .5 ln(.5/.8) + .5 ln(.5/.2) = .5 ln 1.5625 = .2231, both above.
    .5 -> .76: TV .26, KL .5 ln(.25 / .1824) = .1576: below the threshold for A > 0, above the one for A < 0.
    .5 -> .24: the same numbers with rho < 1. .001 -> .002: rho 2, TV .001, KL below .001.
    A position above its threshold has loss and gradient 0 only where the step leads away from pi_old.
    """
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.5, 0.001]]).log()
    new = torch.tensor([[0.8, 0.8, 0.76, 0.24, 0.24, 0.002]])
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 2.0]])
    expected = torch.tensor([[0.0, 3.2, -3.04, 0.0, -0.96, -4.0]])
    low, high = (0.2, 0.28) if kind == "dppo_tv" else (0.1, 0.2)
    log_probs = new.log().requires_grad_()
    algorithm = Algorithm(policy_loss=kind, clip_ratio_low=low, clip_ratio_high=high)
    loss, metrics = KINDS[kind](log_probs, old, advantages, None, algorithm)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(log_probs.grad, expected)
    found = metrics.finalize()
    assert found["actor/clip_frac_high"] == found["actor/clip_frac_low"] == pytest.approx(1 / 6)


def test_reinforce() -> None:
    loss, gradient, metrics = run("reinforce")
    torch.testing.assert_close(gradient, torch.where(MASK, -ADVANTAGES, 0.0))
    torch.testing.assert_close(loss, torch.where(MASK, -ADVANTAGES * (OLD + STEP), 0.0))
    assert metrics["actor/approx_kl"] == pytest.approx(-1.3 / 5)
    assert "actor/clip_frac" not in metrics


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_first_step_is_reinforce(kind: str) -> None:
    """Ratio 1: with the advantage of a sequence at each of its tokens, every kind has the gradient of -A log pi."""
    log_probs = OLD.clone().requires_grad_()
    advantages = torch.tensor([[1.5], [-0.5], [2.0]]).expand(3, 4)
    loss, metrics = KINDS[kind](log_probs, OLD, advantages, MASK, Algorithm(policy_loss=kind))
    aggregate(loss, MASK, Denominators.of(MASK, 4), "seq-mean-token-mean").backward()
    lengths = MASK.sum(dim=1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(log_probs.grad, torch.where(MASK, -advantages / lengths / 2, 0.0))
    assert metrics.finalize()["actor/approx_kl"] == 0


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e6])
def test_masked_positions_touch_nothing(kind: str, garbage: float) -> None:
    def measure(filling: float) -> tuple[Tensor, Tensor, dict[str, float]]:
        tensors = [torch.where(MASK, x, filling) for x in (OLD + STEP, OLD, ADVANTAGES)]
        log_probs = tensors[0].requires_grad_()
        loss, metrics = KINDS[kind](log_probs, *tensors[1:], MASK, Algorithm(policy_loss=kind))
        loss.sum().backward()
        assert log_probs.grad is not None
        return loss.detach(), log_probs.grad, metrics.finalize()

    clean, dirty = measure(0.0), measure(garbage)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert clean[2] == dirty[2]


@pytest.mark.parametrize("kind", ["gspo", "gmpo", "sapo", "cispo", "reinforce", "dppo_tv", "dppo_kl"])
def test_gradient_matches_finite_differences(kind: str) -> None:
    """cispo: of -stop(weight) A log pi, the weight held where it is."""
    old, log_probs = OLD.double(), (OLD + STEP).double().requires_grad_()
    algorithm, here = Algorithm(policy_loss=kind), log_probs.detach().clone()

    def loss(x: Tensor) -> Tensor:
        if kind == "cispo":
            return KINDS[kind](here, old, ADVANTAGES.double(), MASK, algorithm)[0] / here * x
        return KINDS[kind](x, old, ADVANTAGES.double(), MASK, algorithm)[0]

    assert torch.autograd.gradcheck(loss, log_probs)


@given(st.permutations(range(3)))
def test_rows_do_not_depend_on_each_other(order: list[int]) -> None:
    for kind in POLICY_LOSSES:
        whole, _ = KINDS[kind](OLD + STEP, OLD, ADVANTAGES, MASK, Algorithm())
        parts, _ = KINDS[kind](*(x[order] for x in (OLD + STEP, OLD, ADVANTAGES, MASK)), Algorithm())
        assert torch.equal(whole[order], parts)


class TestOfTheUser:
    SOURCE = """
import torch
from rl_platform.algorithms.metrics import Metrics, over

def squared(log_probs, old_log_probs, advantages, mask, algorithm):
    ratio = (log_probs - old_log_probs).exp()
    return -advantages * ratio + algorithm.clip_ratio_low * (1 / log_probs - 1 / old_log_probs), Metrics()

def number(log_probs, old_log_probs, advantages, mask, algorithm):
    return -(advantages * log_probs).mean(), Metrics()

def bare(log_probs, old_log_probs, advantages, mask, algorithm):
    return -advantages * log_probs

def cut_off(log_probs, old_log_probs, advantages, mask, algorithm):
    return -advantages * log_probs.detach(), Metrics()

def plain_numbers(log_probs, old_log_probs, advantages, mask, algorithm):
    return -advantages * log_probs, Metrics(means={"actor/mine": 3.0})

def several(log_probs, old_log_probs, advantages, mask, algorithm):
    return -advantages * log_probs, Metrics(maxima={"actor/mine": log_probs.amax(1)})

def measured(log_probs, old_log_probs, advantages, mask, algorithm):
    means = over(2.0, {"actor/mine": log_probs.sum()})
    return -advantages * log_probs, Metrics(means, maxima={"actor/most": log_probs.max()})

def mixed(log_probs, old_log_probs, advantages, mask, algorithm):
    return -advantages * log_probs, Metrics(over(2.0, {"actor/mine": log_probs.sum(), "actor/loss": log_probs.sum()}))

def elsewhere(log_probs, old_log_probs, advantages, mask, algorithm):
    return -advantages * log_probs, Metrics(maxima={"reward/mean": log_probs.max()})

def rude(log_probs, old_log_probs, advantages, mask, algorithm):
    if mask is None:
        advantages.mul_(2)
    return -advantages * log_probs, Metrics()

constant = 3
"""

    @pytest.fixture(autouse=True)
    def _module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_losses.py").write_text(self.SOURCE)
        (tmp_path / "broken_losses.py").write_text("import nothing_of_this_name")
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("my_losses", "broken_losses"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        policy_loss_function.cache_clear()

    def test_the_example_of_the_guide(self) -> None:
        """The best ratio is 1 + 0.2 for a positive advantage: no slope there, and one that leads back beyond it."""
        ratio = torch.tensor([[1.2, 1.0, 1.5, 0.8]], dtype=torch.float64)
        log_probs, zeros = ratio.log().requires_grad_(), torch.zeros(1, 4, dtype=torch.float64)
        advantages = torch.tensor([[2.0, 2.0, 2.0, -1.0]], dtype=torch.float64)
        function = policy_loss_function(f"{EXAMPLE}:held_ratio")
        loss, metrics = function(log_probs, zeros, advantages, None, Algorithm(clip_ratio_low=0.2))
        loss.sum().backward()
        expected = [2 * 0.04 / 0.4 - 2.4, -2.0, 2 * 0.25 / 0.4 - 3.0, 0.04 / 0.4 + 0.8]
        assert loss[0].tolist() == pytest.approx(expected)
        assert (log_probs.grad / ratio)[0].tolist() == pytest.approx([0.0, -2.0, 3.0, 0.0])
        assert metrics.finalize() == {"actor/beyond_frac": 0.25}

    def loss(self, name: str) -> tuple[Tensor, Metrics]:
        log_probs = (OLD + STEP).requires_grad_()
        batch = make_batch(MASK, log_probs=OLD, advantages=ADVANTAGES)
        return actor_loss(ModelOutputs(log_probs), batch, Denominators.of(MASK, 4), Algorithm(policy_loss=name))

    def test_is_called_and_aggregated(self) -> None:
        loss, metrics = self.loss("my_losses:squared")
        expected = -ADVANTAGES * STEP.exp() + 0.2 * (1 / (OLD + STEP) - 1 / OLD)
        assert loss.item() == pytest.approx(expected[MASK].mean().item(), rel=1e-5)
        assert metrics.finalize()["actor/pg_loss"] == pytest.approx(loss.item())

    def test_sees_zeros_where_nothing_counts(self) -> None:
        """1 / log_probs of the NaN below would spoil every gradient."""
        dirty = torch.where(MASK, OLD + STEP, float("nan")).requires_grad_()
        function = policy_loss_function("my_losses:squared")
        loss, _ = function(dirty, OLD, ADVANTAGES, MASK, Algorithm())
        assert not loss.isnan()[MASK].any()

    def test_its_metrics_keep_no_tensors_in_memory(self) -> None:
        _, metrics = self.loss("my_losses:measured")
        assert not any(sums.total.requires_grad for sums in metrics.means.values())
        assert not metrics.maxima["actor/most"].requires_grad

    def test_it_must_not_change_what_it_is_lent(self) -> None:
        function = policy_loss_function("my_losses:rude")
        with pytest.raises(ConfigError, match=r"changed advantages, which it is lent"):
            function((OLD + STEP).requires_grad_(), OLD, ADVANTAGES.clone(), None, Algorithm())

    def test_the_names_that_it_must_not_use_are_those_of_the_reference(self) -> None:
        """All metrics of the actor but those that depend on the policy loss."""
        named = {metric.name: metric.source for metric in definitions()}
        ours = {name.removeprefix("actor/") for name in named if name.startswith("actor/")}
        of_losses = {name for name in ours if named[f"actor/{name}"] == "platform/algorithms/policy_losses.py"}
        assert {*TAKEN} - {"router_aux_loss"} == ours - of_losses

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("my_losses:sqared", "cannot be imported: AttributeError"),
            ("no_such_module:loss", "cannot be imported: ModuleNotFoundError"),
            ("broken_losses:loss", "nothing_of_this_name"),
            ("my_losses:constant", "is not a function"),
            ("my_losses:number", r"not one number per position"),
            ("my_losses:bare", "returned Tensor"),
            ("my_losses:cut_off", "has no gradient"),
            ("my_losses:plain_numbers", "have 'actor/mine' as means"),
            ("my_losses:mixed", "metric actor/loss is one of the platform, .*\n(.*\n)*.*name, as actor/my_loss"),
            ("my_losses:elsewhere", "metric reward/mean has no actor/ in front"),
            ("my_losses:several", r"metric actor/mine is no number but has the shape \[3\]"),
        ],
    )
    @pytest.mark.usefixtures("any_shapes")
    def test_what_is_wrong_is_said(self, name: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason) as caught:
            self.loss(name)
        assert caught.value.problems[0].key == "algorithm.policy_loss"


class TestPositiveExamples:
    """Correct sequences with likelihood losses {1}, {2, 2}, an incorrect one with {4}: (1 + 2 + 2) / 3."""

    LOG_PROBS = -torch.tensor([[1.0, 0.0], [2.0, 2.0], [4.0, 0.0]])
    MASK = torch.tensor([[True, False], [True, True], [True, False]])
    CORRECT = torch.tensor([True, True, False])

    @pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]]], ids=str)
    @pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
    def test_the_denominator_is_the_mini_batchs(self, parts: list[list[int]], mode: str) -> None:
        log_probs = self.LOG_PROBS.clone().requires_grad_()
        zeros = torch.zeros(3, 2)
        batch = make_batch(self.MASK, log_probs=log_probs.detach(), advantages=zeros, correct=self.CORRECT)
        denominators = Denominators.of(self.MASK, 2, self.CORRECT)
        algorithm = Algorithm(positive_nll_coef=0.5, loss_agg_func=mode)
        total, metrics = 0.0, Metrics()
        for part in parts:
            index = torch.tensor(part)
            loss, found = actor_loss(ModelOutputs(log_probs[index]), batch.select(index), denominators, algorithm)
            loss.backward()
            total, metrics = total + loss.item(), metrics.merge(found)
        assert metrics.finalize()["actor/positive_nll"] == pytest.approx(5 / 3)
        assert total == pytest.approx(0.5 * 5 / 3)
        torch.testing.assert_close(log_probs.grad, torch.tensor([[-1.0, 0], [-1, -1], [0, 0]]) / 6)

    @pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1], [2]]], ids=str)
    def test_over_all_tokens(self, parts: list[list[int]]) -> None:
        denominators = Denominators.of(self.MASK, 2, self.CORRECT)
        losses = [
            positive_nll(self.LOG_PROBS[part], self.CORRECT[part], self.MASK[part], denominators, "all_tokens")
            for part in parts
        ]
        assert sum(losses).item() == pytest.approx(5 / 4)

    def test_nothing_correct_is_zero_with_a_graph(self) -> None:
        log_probs = self.LOG_PROBS.clone().requires_grad_()
        none = torch.zeros(3, dtype=torch.bool)
        loss = positive_nll(log_probs, none, self.MASK, Denominators.of(self.MASK, 2, none))
        loss.backward()
        assert loss.item() == 0
        assert log_probs.grad is not None
        assert not log_probs.grad.any()

    def test_masked_tokens_of_correct_rows_do_not_count(self) -> None:
        log_probs = torch.where(self.MASK, self.LOG_PROBS, float("nan")).requires_grad_()
        loss = positive_nll(log_probs, self.CORRECT, self.MASK, Denominators.of(self.MASK, 2, self.CORRECT))
        loss.backward()
        assert loss.item() == pytest.approx(5 / 3)
        assert log_probs.grad is not None
        assert torch.isfinite(log_probs.grad).all()

    def test_full_masks(self) -> None:
        full = torch.ones(3, 2, dtype=torch.bool)
        denominators = Denominators.of(full, 2, self.CORRECT)
        assert denominators.correct_tokens == 4
        found = [positive_nll(self.LOG_PROBS, self.CORRECT, mask, denominators).item() for mask in (full, None)]
        assert found[0] == found[1] == pytest.approx(5 / 4)


def test_the_default_is_the_clipped_loss() -> None:
    assert policy_loss_function(Algorithm().policy_loss) is ppo_clip
