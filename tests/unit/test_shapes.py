"""Signatures of the mathematics name the shapes of their tensors, and tests hold callers to them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rl_platform.algorithms.statistics import whiten_rows
from rl_platform.records import RolloutBatch

jaxtyping = pytest.importorskip("jaxtyping", reason="not installed: pip install -e '.[test]'")
from shapes import EVERY, FIRST  # noqa: E402 - it needs jaxtyping


def test_a_wrong_shape_is_refused() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert whiten_rows(torch.ones(2, 3), mask).shape == (2, 3)
    for wrong in (torch.ones(2, 4), torch.ones(6), torch.ones(2, 3, dtype=torch.int64)):
        with pytest.raises(jaxtyping.TypeCheckError):
            whiten_rows(wrong, mask)


def test_fields_of_a_batch_belong_together() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    rows = torch.ones(2, dtype=torch.bool), torch.arange(2)
    assert len(RolloutBatch({}, mask, *rows, torch.zeros(2, 3), torch.zeros(2, 3))) == 2
    with pytest.raises(jaxtyping.TypeCheckError):
        RolloutBatch({}, mask, *rows, torch.zeros(2, 4), torch.zeros(2, 3))


def test_of_many_calls_in_a_test_the_first_and_a_share_of_the_others_are_checked() -> None:
    wrong = {}, torch.ones(2, 3, dtype=torch.bool), torch.ones(2, dtype=torch.bool), torch.arange(2)
    refused = []
    for count in range(1, 2 * EVERY + 1):
        try:
            RolloutBatch(*wrong, torch.zeros(2, 4), torch.zeros(2, 3))
        except jaxtyping.TypeCheckError:
            refused.append(count)
    assert refused == [*range(1, FIRST + 1), EVERY, 2 * EVERY]


def test_a_run_does_not_load_the_checker() -> None:
    code = "import sys, rl_platform.algorithms.advantages, rl_platform.runners.ppo; print('jaxtyping' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False", loaded.stderr
