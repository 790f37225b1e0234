"""The interface of environments that give and take tensors of a device, during a rollout."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class DeviceStep(NamedTuple):
    """One step of N environments as tensors of their device; fields as those of `StepResult`.

    final_observations [N,D]: of every environment, its observation before a reset. returns, lengths [N]: of the
    episodes so far, before a reset.
    """

    observations: Tensor
    rewards: Tensor
    terminated: Tensor
    ended: Tensor
    invalid: Tensor
    final_observations: Tensor
    returns: Tensor
    lengths: Tensor


class DeviceEnvs(Protocol):
    """The environments of a `VectorEnv` during a rollout; until `finish` it has no other use."""

    device: torch.device

    def computing(self) -> AbstractContextManager[None]:
        """All tensors of the rollout are computed within it."""

    def step(self, actions: Tensor) -> DeviceStep:
        """Steps all environments with actions [N,A], clipped here, without waiting for the device. Episodes that end
        are followed by new ones."""

    def finish(self) -> None:
        """Copies the state to the `VectorEnv`. Raises Diverged if actions were not finite."""
