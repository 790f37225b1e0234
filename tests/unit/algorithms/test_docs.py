from __future__ import annotations

from pathlib import Path
from typing import get_args

from rl_platform.config.describe import choices, section_of, walk
from rl_platform.config.schema.algorithm import (
    ESTIMATORS,
    PFPPO,
    POLICY_LOSSES,
    ActionLevel,
    Algorithm,
    Bootstrap,
    KLGradient,
    KLLossType,
    LossAggregation,
    OldLogProbs,
)

TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")


# A section that is on by being there has a row of its own, one that is always there has only those of its keys.
FIELDS = {
    name: field for name, field in walk(Algorithm) if section_of(field.annotation) is None or field.default is None
}
METHODS = choices(PFPPO.model_fields["method"].annotation)
ENUMERATIONS = (KLLossType, KLGradient, LossAggregation, OldLogProbs, ActionLevel, Bootstrap)
CHOICES = [*(name for kind in ENUMERATIONS for name in get_args(kind)), *METHODS, *ESTIMATORS, *POLICY_LOSSES]


def written(default: object) -> str:
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return default if isinstance(default, str) else f"{default:g}"


def test_every_key_is_documented_with_its_default() -> None:
    rows = [f"| `{key}` | {'required' if f.is_required() else written(f.default)} |" for key, f in FIELDS.items()]
    assert [row for row in rows if row not in TEXT] == []


def test_every_choice_is_documented() -> None:
    assert [name for name in CHOICES if f"`{name}`" not in TEXT] == []


def test_every_documented_key_exists_and_stands_once() -> None:
    documented = [line.split("`")[1] for line in TEXT.splitlines() if line.startswith("| `")]
    keys = [name for name in documented if name not in CHOICES and "/" not in name]  # a metric has a "/"
    assert sorted(keys) == sorted(FIELDS)
