"""Answers of a group whose ranks share the rows of a batch without talking to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SomeRows:
    """What one of several ranks says of a batch: fields of `rows` [n], each [n,...]; no fields for no rows."""

    rows: Tensor
    fields: dict[str, Tensor]


def of_all_rows(answers: Sequence[Any]) -> Any:
    """What a group says of a batch: the rows of all its ranks together, where each has answered for its own, else what
    the first one says, as all say the same."""
    if not isinstance(answers[0], SomeRows):
        return answers[0]
    parts = [answer for answer in answers if len(answer.rows)]
    order = torch.cat([part.rows for part in parts]).argsort()
    return {name: torch.cat([part.fields[name] for part in parts])[order] for name in parts[0].fields}
