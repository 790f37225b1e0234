from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from rl_platform.config.describe import section_of
from rl_platform.config.explanations.accepted_values import choices, walk
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


def test_every_key_is_explained() -> None:
    """A key of a nested section by its whole path. Code blocks hold names of keys too."""
    assert [name for name in FIELDS if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", TEXT)] == []


def test_every_choice_is_documented() -> None:
    assert [name for name in CHOICES if f"`{name}`" not in TEXT] == []


def test_the_table_of_other_systems_has_our_defaults() -> None:
    table = TEXT.partition("## In other systems")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for key, default in rows:
        field = FIELDS[key.strip(" `")]
        assert default.strip() == ("required" if field.is_required() else written(field.default)), key
