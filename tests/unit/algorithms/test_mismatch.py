"""Weights for the mismatch of rollout and training, rejection, and the metrics of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.mismatch import mismatch_metrics, token_mismatch_metrics
from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.config.schema.algorithm import RolloutIS

TRAINED = torch.tensor([[-1.0, -1.0, -2.0, -0.5]])
ROLLED = torch.tensor([[-1.2, -3.0, -1.0, -0.5]])
ALL = torch.ones(1, 4, dtype=torch.bool)
RATIOS = [1.221403, 7.389056, 0.367879, 1.0]
SEQUENCE = 3.320117  # exp(.2 + 2 - 1 + 0)


def weights(trained: Tensor = TRAINED, rolled: Tensor = ROLLED, mask: Tensor = ALL, **keys: Any) -> Tensor:
    return mismatch_weights(trained, rolled, mask, RolloutIS.model_validate(keys))[0]


def metrics(trained: Tensor = TRAINED, rolled: Tensor = ROLLED, mask: Tensor = ALL, **keys: Any) -> dict[str, float]:
    return mismatch_weights(trained, rolled, mask, RolloutIS.model_validate(keys))[1]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"high": None}, RATIOS),
        ({}, [1.221403, 2, 0.367879, 1]),
        ({"low": 0.5}, [1.221403, 2, 0.5, 1]),
        ({"mode": "icepop", "low": 0.5, "high": 5.0}, [1.221403, 0, 0, 1]),
        ({"level": "sequence", "high": None}, [SEQUENCE] * 4),
        ({"level": "sequence"}, [2.0] * 4),
        ({"mode": "icepop", "level": "sequence", "high": 3.0}, [0.0] * 4),
        ({"mode": "icepop", "level": "sequence", "high": 4.0}, [SEQUENCE] * 4),
        ({"mode": "sequence_mask", "high": 1.34}, [0.0] * 4),  # the geometric mean is 1.349859
        ({"mode": "sequence_mask", "high": 1.35}, RATIOS),
        ({"batch_normalize": True}, [x / 4.589282 * 4 for x in (1.221403, 2, 0.367879, 1)]),
        ({"mode": None, "reject": {"stat": "k1", "level": "token", "threshold": 0.5}}, [1, 1, 0, 1]),  # -u > .5
        ({"mode": None, "reject": {"stat": "k2", "level": "token", "threshold": 0.5}}, [1, 0, 1, 1]),  # u^2/2 > .5
        ({"mode": None, "reject": {"stat": "k3", "level": "token", "threshold": 0.3}}, [1, 0, 0, 1]),
        ({"mode": None, "reject": {"threshold": 1.1}}, [0.0] * 4),  # mean k3 is 1.194585
        ({"mode": None, "reject": {"threshold": 1.2}}, [1.0] * 4),
        ({"reject": {"stat": "k2", "level": "token", "threshold": 0.5}}, [1.221403, 0, 0.367879, 1]),
        # u = .2, 2, -1, 0; -u is below -.5 at 2 and above .5 at -1
        (
            {"mode": None, "reject": {"stat": "k1", "level": "token", "threshold": 0.5, "low": -0.5}},
            [1, 0, 0, 1],
        ),
        # mean -u = -(.2 + 2 - 1 + 0) / 4 = -.3: one side keeps the sequence, the other one does not
        ({"mode": None, "reject": {"stat": "k1", "threshold": 0.1}}, [1.0] * 4),
        ({"mode": None, "reject": {"stat": "k1", "threshold": 0.1, "low": -0.29}}, [0.0] * 4),
        ({"mode": None, "reject": {"stat": "k1", "threshold": 0.1, "low": -0.31}}, [1.0] * 4),
        # the smallest ratio is exp(-1) = .367879
        ({"mode": None, "veto": 0.36}, [1.0] * 4),
        ({"mode": None, "veto": 0.37}, [0.0] * 4),
        ({"veto": 0.37, "reject": {"threshold": 1.2}}, [0.0] * 4),
    ],
    ids=str,
)
def test_weights(keys: dict[str, Any], expected: list[float]) -> None:
    torch.testing.assert_close(weights(**keys)[0], torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["truncate", "icepop", "sequence_mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_engines_that_agree_have_weight_one(mode: str, level: str) -> None:
    found, measured = mismatch_weights(TRAINED, TRAINED, ALL, RolloutIS.model_validate({"mode": mode, "level": level}))
    assert torch.equal(found, torch.ones(1, 4))
    assert measured == {
        "is/weight_mean": 1.0,
        "is/weight_max": 1.0,
        "is/weight_min": 1.0,
        "is/ess": 1.0,
        "is/oob_frac": 0.0,
        "is/rejected_frac": 0.0,
        "is/nonfinite": 0.0,
        "is/masked_seqs": 0.0,
    }


def test_a_veto_reads_active_positions_of_its_own_sequence_only() -> None:
    trained = torch.tensor([[-1.0, -9.0, -1.0], [-9.0, -1.0, -1.0]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    rolled = torch.full((2, 3), -1.0)
    assert weights(trained, rolled, mask, mode=None, veto=0.01).tolist() == [[1, 0, 1], [0, 0, 0]]


def test_metrics_of_weights() -> None:
    plain = metrics(high=None)
    assert plain["is/ess"] == pytest.approx(0.434979, rel=1e-5)
    assert plain["is/weight_mean"] == pytest.approx(sum(RATIOS) / 4, rel=1e-5)
    assert (plain["is/weight_max"], plain["is/weight_min"]) == pytest.approx((7.389056, 0.367879), rel=1e-5)
    assert plain["is/oob_frac"] == 0
    assert metrics(low=0.5)["is/oob_frac"] == 0.5
    dropped = metrics(mode=None, reject={"threshold": 1.1})
    assert dropped["is/masked_seqs"] == dropped["is/rejected_frac"] == 1.0
    assert dropped["is/ess"] == 0
    assert metrics(mask=~ALL) == {}


def test_rejected_tokens_do_not_change_the_mean_that_normalises() -> None:
    keys = {"batch_normalize": True, "reject": {"stat": "k2", "level": "token", "threshold": 0.5}}
    kept = weights(batch_normalize=True).masked_fill(torch.tensor([[False, True, False, False]]), 0.0)
    assert torch.equal(weights(**keys), kept)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["truncate", "icepop", "sequence_mask", None])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_is_not_finite_has_weight_zero_and_is_counted(garbage: float, mode: str | None, level: str) -> None:
    trained, rolled = TRAINED.repeat(2, 1), TRAINED.repeat(2, 1)
    rolled[0, 1] = garbage
    found, measured = mismatch_weights(
        trained, rolled, ALL.expand(2, 4), RolloutIS.model_validate({"mode": mode, "level": level, "high": None})
    )
    whole = mode == "sequence_mask" or (mode is not None and level == "sequence")
    expected = torch.ones(2, 4)
    expected[0, slice(None) if whole else 1] = 0.0
    assert torch.equal(found, expected)
    assert measured["is/nonfinite"] == 1
    assert all(math.isfinite(value) for value in measured.values())


@pytest.mark.parametrize(
    "keys", [{}, {"level": "sequence"}, {"mode": "sequence_mask"}, {"batch_normalize": True}], ids=str
)
def test_masked_positions_change_nothing(keys: dict[str, Any]) -> None:
    keys = keys | {"reject": {"threshold": 5.0}}
    mask = torch.tensor([[False, True, True, False, True, True]])
    wide = [torch.full((1, 6), float("nan")).masked_scatter(mask, x) for x in (TRAINED, ROLLED)]
    found, measured = mismatch_weights(wide[0], wide[1], mask, RolloutIS.model_validate(keys))
    assert torch.equal(found[mask], weights(**keys)[0])
    assert not found[~mask].any()
    assert measured == pytest.approx(metrics(**keys))


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(1, 50),
    st.sampled_from(["truncate", "icepop"]),
    st.sampled_from(["token", "sequence"]),
)
def test_weights_lie_within_their_bounds(u: list[float], low: float, high: float, mode: str, level: str) -> None:
    rolled = -torch.tensor([u])
    mask = torch.ones(1, len(u), dtype=torch.bool)
    found = weights(torch.zeros_like(rolled), rolled, mask, low=low, high=high, mode=mode, level=level)
    inside = (found >= low - 1e-6) & (found <= high * (1 + 1e-6))
    assert bool((inside | (found == 0)).all())
    if mode == "truncate":
        plain = weights(torch.zeros_like(rolled), rolled, mask, high=None, level=level)
        torch.testing.assert_close(found, plain.clamp(low, high))


def test_mismatch() -> None:
    trained = torch.cat((TRAINED, torch.tensor([[float("nan")]])), dim=1)
    rolled = torch.cat((ROLLED, torch.zeros(1, 1)), dim=1)
    mask = torch.tensor([[True, True, True, True, False]])
    expected = {"mismatch/prob_error": 3.082185, "mismatch/kl": -0.3, "mismatch/k3": 1.194585, "mismatch/abs_logp": 0.8}
    assert mismatch_metrics(trained, rolled, mask) == pytest.approx(expected, rel=1e-5)
    p, q = TRAINED.exp().double()[0], ROLLED.exp().double()[0]
    expected = {
        "mismatch/chi2_token": 13.306328,
        "mismatch/chi2_seq": 10.023176,
        "mismatch/ppl_ratio": 3.080217 / 4.157858,
        "mismatch/prob_diff_mean": float((p - q).abs().mean()),
        "mismatch/prob_diff_max": float((p - q).abs().max()),
        "mismatch/prob_diff_pearson": float(torch.corrcoef(torch.stack((p, q)))[0, 1]),
        "mismatch/seq_prob_error_max": 3.082185,
        "mismatch/seq_prob_error_mean": 3.082185,
        "mismatch/seq_prob_error_min": 3.082185,
    }
    assert token_mismatch_metrics(trained, rolled, mask) == pytest.approx(expected, rel=1e-5)


def test_mismatch_per_sequence() -> None:
    """Rows with errors exp(.1) and exp(.5), and one without any active token."""
    u = torch.tensor([[0.1, -0.1, 0.0], [0.5, 0.0, 0.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    found = token_mismatch_metrics(u - 2, torch.full((3, 3), -2.0), mask)
    errors = math.exp(0.1), math.exp(0.5)
    assert found["mismatch/seq_prob_error_min"] == pytest.approx(errors[0])
    assert found["mismatch/seq_prob_error_mean"] == pytest.approx(sum(errors) / 2)
    assert found["mismatch/seq_prob_error_max"] == pytest.approx(errors[1])
    assert found["mismatch/ppl_ratio"] == pytest.approx((1 + math.exp(-0.5)) / 2)
    assert found["mismatch/chi2_seq"] == pytest.approx((0 + math.expm1(1.0)) / 2, rel=1e-5)


def test_nothing_to_correlate_is_left_out() -> None:
    assert "mismatch/prob_diff_pearson" not in token_mismatch_metrics(TRAINED, torch.full((1, 4), -1.0), ALL)
    assert token_mismatch_metrics(TRAINED, ROLLED, ~ALL) == {}


def test_normalised_sequence_weights_count_once_per_token() -> None:
    """Products 2 (three tokens) and 0.5 (one): mean (3 * 2 + 0.5) / 4 = 1.625, not (2 + 0.5) / 2."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    u = torch.tensor([[2.0, 1.0, 1.0], [0.5, 1.0, 1.0]]).log()
    correction = RolloutIS(level="sequence", high=None, batch_normalize=True)
    weights, _ = mismatch_weights(u, torch.zeros(2, 3), mask, correction)
    torch.testing.assert_close(weights[:, 0], torch.tensor([2.0, 0.5]) / 1.625)
