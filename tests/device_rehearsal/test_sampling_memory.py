"""The memory that sampling takes on a GPU, counted by its live tensors, beside the estimate of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_rehearsal.pretended_device import CUDA, Device
from torch.utils._python_dispatch import TorchDispatchMode

from rl_platform.engines.rollout.sampling import sample
from rl_platform.placement.estimates.memory import FILTERED_COPIES, FLOAT, LOGIT_COPIES
from rl_platform.records import SamplingParams

ROWS, VOCABULARY = 16, 4096


class _Peak(TorchDispatchMode):
    """most: the largest number of bytes on the device after an operation."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device, self.most = device, device.allocated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, self._device.allocated())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sampling", "copies"),
    [
        (SamplingParams(1), LOGIT_COPIES),
        (SamplingParams(1, temperature=0.7), LOGIT_COPIES),
        (SamplingParams(1, temperature=0.0), LOGIT_COPIES),
        (SamplingParams(1, top_k=4000), FILTERED_COPIES),
        (SamplingParams(1, temperature=0.7, top_p=0.9), FILTERED_COPIES),
        (SamplingParams(1, temperature=0.7, top_p=0.9, top_k=4000), FILTERED_COPIES),
    ],
    ids=str,
)
def test_logits_and_their_copies_fit_into_the_plan(
    sampling: SamplingParams, copies: int, dtype: torch.dtype, device: Device
) -> None:
    logits = torch.randn(ROWS, VOCABULARY).to(CUDA, dtype)
    before = device.allocated() - logits.nbytes
    with _Peak(device) as peak:
        sample(logits, torch.rand(ROWS, dtype=torch.float64).to(CUDA), sampling)
    planned = ROWS * VOCABULARY * FLOAT * copies
    assert 0.5 * planned - logits.nbytes < peak.most - before < 1.05 * planned  # 5 %: sums of blocks
