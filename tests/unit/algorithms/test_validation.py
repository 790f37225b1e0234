"""A rollout batch that is misaligned or not finite is refused, with the tensor and the first bad index."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_platform.algorithms.validation import (
    PER_CHOICE,
    PER_POSITION,
    PER_ROW,
    SOURCES,
    WITH_FEATURES,
    check_batch,
    check_finite,
)
from rl_platform.errors import DataError, Diverged
from rl_platform.records import _TENSOR_FIELDS, RolloutBatch

pytestmark = pytest.mark.usefixtures("any_shapes")

ROWS, WIDTH = 4, 6
MASKS = ("ends", "bootstrapped", "value_mask", "covariant")


def batch(**fields: Any) -> RolloutBatch:
    """Two prompt tokens, then actions up to each row's length; the last row does not count; every field is there."""
    shape, lengths = (ROWS, WIDTH), torch.tensor([6, 3, 5, 6])
    positions = torch.arange(WIDTH)
    filled = {name: torch.zeros(shape, dtype=torch.bool if name in MASKS else None) for name in PER_POSITION}
    filled |= {name: torch.zeros(*shape, 3) for name in (*WITH_FEATURES, *PER_CHOICE)}
    filled["ends"][:, -1] = True
    base = RolloutBatch(
        inputs={"tokens": torch.zeros(shape, dtype=torch.int64), "lengths": lengths},
        action_mask=(positions >= 2) & (positions < lengths[:, None]),
        sample_mask=torch.tensor([True, True, True, False]),
        group_ids=torch.arange(ROWS),
        correct=torch.ones(ROWS, dtype=torch.bool),
        versions=torch.zeros(ROWS, dtype=torch.int64),
        compared=torch.ones(ROWS, dtype=torch.bool),
        baselines=torch.zeros(ROWS),
        continues=torch.zeros(ROWS, dtype=torch.bool),
        **filled,
    )
    return replace(base, **fields)


def test_every_field_of_a_batch_is_judged() -> None:
    assert {*PER_POSITION, *PER_ROW, *PER_CHOICE, *WITH_FEATURES, "action_mask"} == set(_TENSOR_FIELDS)
    numbers = {
        name
        for name in PER_POSITION
        if name not in (*MASKS, "loss_weights", "kl_penalties", "entropy_units", "token_versions")
    }
    assert numbers == set(SOURCES)


def test_a_good_batch_passes() -> None:
    check_batch(batch())
    optional = [
        name for name in (*PER_POSITION, *PER_CHOICE, *WITH_FEATURES) if name not in ("rewards", "rollout_log_probs")
    ]
    check_batch(batch(**dict.fromkeys(optional)))
    observations = {"observations": torch.zeros(ROWS, WIDTH, 7), "actions": torch.zeros(ROWS, WIDTH)}
    check_batch(batch(inputs=observations, action_mask=torch.ones(ROWS, WIDTH, dtype=torch.bool)))


def test_a_good_batch_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one sum per tensor, three times a step."""
    monkeypatch.setattr("rl_platform.algorithms.validation.first_not_finite", None)
    check_batch(batch())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "end_values"])
def test_numbers_that_are_not_finite_are_named(name: str, value: float) -> None:
    spoilt = torch.zeros(ROWS, WIDTH)
    spoilt[2, 3], spoilt[2, 4] = value, float("nan")
    with pytest.raises(Diverged, match=rf"^{name} of the rollout are not finite, first {name}\[2, 3\] = {value}: .+"):
        check_batch(batch(**{name: spoilt}))


@pytest.mark.parametrize("name", SOURCES)
def test_what_stands_outside_the_mask_may_be_anything(name: str) -> None:
    garbage = torch.full((ROWS, WIDTH), float("nan"))
    good = batch()
    used = good.ends if name == "end_values" else good.mask
    check_batch(replace(good, **{name: torch.where(used, 0.0, garbage)}))


def test_the_value_after_an_end_counts_where_the_step_itself_does_not() -> None:
    spoilt = torch.zeros(ROWS, WIDTH)
    spoilt[3, -1] = float("inf")  # a row that does not count
    with pytest.raises(Diverged, match=r"first end_values\[3, 5\] = inf"):
        check_batch(batch(end_values=spoilt))


def test_what_was_made_first_is_named_first() -> None:
    """Log-probs that are not finite make advantages that are not."""
    spoilt = torch.full((ROWS, WIDTH), float("nan"))
    with pytest.raises(Diverged, match=r"log_probs\[0, 2\] = nan: the actor may have diverged: lower actor.optim.lr"):
        check_batch(batch(log_probs=spoilt, advantages=spoilt, rewards=spoilt))


def test_large_numbers_whose_sum_overflows_are_finite() -> None:
    check_finite("rewards", torch.full((2, 2), 3e38), torch.ones(2, 2, dtype=torch.bool))


def test_a_field_that_something_else_deals_with_is_left_alone() -> None:
    spoilt = batch(rollout_log_probs=torch.full((ROWS, WIDTH), float("nan")))
    check_batch(spoilt, tolerated=("rollout_log_probs",))
    with pytest.raises(Diverged, match="the rollout engine"):
        check_batch(spoilt)


@pytest.mark.parametrize("name", [*PER_POSITION, *PER_ROW, *PER_CHOICE, *WITH_FEATURES])
def test_a_row_too_few_is_named(name: str) -> None:
    short = getattr(batch(), name)[:-1]
    reason = rf"^{name} of the rollout is misaligned: its shape is \[3.*action_mask asks for \[4.*row 3 is the first"
    with pytest.raises(DataError, match=reason):
        check_batch(batch(**{name: short}))


@pytest.mark.parametrize("name", [*PER_POSITION, *WITH_FEATURES])
def test_another_width_is_named(name: str) -> None:
    with pytest.raises(DataError, match=rf"^{name} of the rollout is misaligned: its shape is \[4, 5.* \[4, 6"):
        check_batch(batch(**{name: getattr(batch(), name)[:, :-1]}))


@pytest.mark.parametrize("name", ["rewards", "values", "group_ids"])
def test_one_dimension_too_many_is_named(name: str) -> None:
    with pytest.raises(DataError, match=rf"^{name} of the rollout is misaligned"):
        check_batch(batch(**{name: getattr(batch(), name)[..., None]}))


def test_inputs_are_aligned_too() -> None:
    for name, wrong in (("tokens", torch.zeros(ROWS, 5)), ("lengths", torch.full((3,), 6))):
        with pytest.raises(DataError, match=rf"inputs\['{name}'\] of the rollout is misaligned"):
            check_batch(batch(inputs=batch().inputs | {name: wrong}))
    with pytest.raises(DataError, match=r"inputs\['observations'\].*asks for \[4, ...\]; row 2 is the first"):
        check_batch(batch(inputs={"observations": torch.zeros(2, WIDTH, 7)}))


@pytest.mark.parametrize("name", ["sample_mask", "action_mask", "correct", "ends"])
def test_masks_are_boolean(name: str) -> None:
    """An int64 mask would select rows by number where a bool one selects by position."""
    with pytest.raises(DataError, match=rf"{name} of the rollout is of type torch.int64"):
        check_batch(batch(**{name: getattr(batch(), name).long()}))


@pytest.mark.parametrize("length", [4, 7])
def test_a_length_that_cuts_off_actions_or_passes_the_width(length: int) -> None:
    lengths = torch.tensor([6, 3, length, 6])
    with pytest.raises(DataError, match=rf"first lengths\[2\] = {length}: its last action is at position 4 of 6"):
        check_batch(batch(inputs=batch().inputs | {"lengths": lengths}))


def test_an_action_without_a_token_before_it() -> None:
    mask = batch().action_mask.clone()
    mask[1, 0] = True
    with pytest.raises(DataError, match=r"action_mask\[1, 0\].*A prompt is empty"):
        check_batch(batch(action_mask=mask))
