"""Distillation from a teacher: its part of the advantages, alone and beside a reward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.algorithms.advantages import advantages
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.errors import ConfigError
from rl_platform.models.tokenizer import ByteTokenizer, check_same_tokens
from rl_platform.records import RolloutBatch

NAN = float("nan")
MASK = torch.tensor([[False, True, True], [False, True, False]])


def batch() -> RolloutBatch:
    """Scores 2 and 1; log pi_old - log pi_teacher: .5 and -.25 in row 0, 1 in row 1."""
    return neutral_batch(
        MASK,
        group_ids=torch.tensor([3, 3]),
        rewards=torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]]),
        log_probs=torch.tensor([[NAN, -1.0, -1.25], [NAN, -0.5, NAN]]),
        reference_log_probs=torch.tensor([[NAN, -1.5, -1.0], [NAN, -1.5, NAN]]),
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # -c d alone: -2 (.5), -2 (-.25), -2 (1)
        ({"adv_type": "distillation", "distillation_coef": 2.0}, [[0, -1.0, 0.5], [0, -2.0, 0]]),
        # rloo: 2 - 1 = 1 and 1 - 2 = -1; with -d: 1 - .5, 1 + .25, -1 - 1
        ({"adv_type": "rloo", "distillation_coef": 1.0}, [[0, 0.5, 1.25], [0, -2.0, 0]]),
        ({"adv_type": "rloo", "distillation_coef": 1.0, "advantage_clip": (-1, 1)}, [[0, 0.5, 1.0], [0, -1.0, 0]]),
        # raw whitened: scores 2, 2, 1 have mean 5/3 and deviation sqrt(1/3); whitening does not include -d / 2
        (
            {"adv_type": "raw", "distillation_coef": 0.5},
            [[0, 0.577350 - 0.25, 0.577350 + 0.125], [0, -1.154701 - 0.5, 0]],
        ),
        ({"adv_type": "rloo"}, [[0, 1.0, 1.0], [0, -1.0, 0]]),
    ],
    ids=str,
)
def test_advantages(keys: dict[str, Any], expected: list[list[float]]) -> None:
    estimated, returns = advantages(batch(), Algorithm.model_validate({"group_size": 2, **keys}))
    assert returns is None
    torch.testing.assert_close(estimated, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_teacher_with_other_tokens_is_refused() -> None:
    class Shifted(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [byte + 1 for byte in text.encode()]

    check_same_tokens(ByteTokenizer(), ByteTokenizer(), "reference.model")
    with pytest.raises(ConfigError) as caught:
        check_same_tokens(ByteTokenizer(), Shifted(), "reference.model")
    assert caught.value.problems[0].key == "reference.model"
    assert "other tokens than the actor" in caught.value.problems[0].message
