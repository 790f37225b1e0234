"""The advantage estimators by their name in `algorithm.adv_type`: the inputs and keys that each one reads.

The formulas are in `algorithms/`. A user's own estimator, written as module:function, may read any key.
"""

from __future__ import annotations

from typing import NamedTuple


class Estimator(NamedTuple):
    """values: needs a critic's; groups: compares samples of one prompt; whitens: always or never (None: as
    `normalize_advantages` says); keys: those of `algorithm` that only some estimators read, and this one does."""

    values: bool = False
    groups: bool = False
    whitens: bool | None = None
    keys: tuple[str, ...] = ()


ESTIMATORS = {
    "gae": Estimator(
        values=True,
        keys=(
            "gamma",
            "gae_lambda",
            "gae_lambda_policy",
            "gae_lambda_value",
            "length_adaptive_alpha",
            "bootstrap_truncated",
        ),
    ),
    "grpo": Estimator(groups=True, whitens=False, keys=("grpo_std_normalization", "grpo_leave_one_out")),
    "rloo": Estimator(groups=True, whitens=False),
    "reinforce_plus_plus": Estimator(whitens=True, keys=("gamma", "reinforce_kl_credit")),
    "reinforce_plus_plus_baseline": Estimator(groups=True, whitens=True, keys=("whiten_over",)),
    "raw": Estimator(),
}
_ANY = Estimator()


def estimator_of(adv_type: str) -> Estimator:
    """The needs of `adv_type`. A user's function has none, and gets values if there is a critic."""
    return ESTIMATORS.get(adv_type, _ANY)
