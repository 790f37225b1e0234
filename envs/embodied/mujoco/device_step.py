"""The interface of environments that take and return tensors of a device during a rollout."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class DeviceStep(NamedTuple):
    """One step of N environments as tensors of their device. `StepResult` describes the fields of the same names.

    final_observations [N,D]: the observations of all environments before a reset. returns, lengths [N]: those of the
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
    """The environments of a `VectorEnv` during a rollout. Until `finish` the `VectorEnv` must not be used."""

    device: torch.device

    def computing(self) -> AbstractContextManager[None]:
        """Returns the context in which all tensors of the rollout are computed."""

    def step(self, actions: Tensor) -> DeviceStep:
        """Clips actions [N,A] and steps all environments, without waiting for the device.

        Begins a new episode in environments whose episode ended.
        """

    def finish(self) -> None:
        """Copies the state to the `VectorEnv`. Raises Diverged if actions were not finite."""
