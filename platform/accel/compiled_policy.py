"""Acting with a small policy on a CPU by compiled loops instead of tensor operations.

The results equal those of `ActorCriticPolicy.act` up to rounding, from the same random numbers. Not covered: training
(accel/compiled_training.py), and policies other than a small MLP with tanh.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rl_platform.accel import compiled_acting as loops
from rl_platform.accel import compiled_ppo as ppo
from rl_platform.models.policy import ActorCriticPolicy, Tanh

LARGEST = 2**15  # parameters; above, torch is faster for a few dozen rows


def is_plain(policy: nn.Module) -> bool:
    """Whether the policy is an MLP with tanh and two linear heads: Gaussian with free deviations, or categorical."""
    if type(policy) is not ActorCriticPolicy:
        return False
    known = {name for name, _ in policy.named_parameters() if name.startswith("backbone.")}
    known |= {f"{head}_head.{part}" for head in ("policy", "value") for part in ("weight", "bias")}
    known |= {"log_std"} if policy.action_space.kind == "continuous" else set()
    layers = list(policy.backbone)
    return (
        {name for name, _ in policy.named_parameters()} == known
        and policy.squash is None
        and all(isinstance(layer, nn.Linear) for layer in layers[::2])
        and all(isinstance(layer, Tanh) for layer in layers[1::2])
    )


def acts_compiled(policy: nn.Module, device: torch.device) -> bool:
    """Whether `CompiledPolicy` can act in the policy's place."""
    small = sum(parameter.numel() for parameter in policy.parameters()) <= LARGEST
    return small and device.type == "cpu" and is_plain(policy) and policy.policy_head.weight.dtype == torch.float32


class CompiledPolicy:
    """A copy of the policy's present weights; new weights need a new copy."""

    def __init__(self, policy: ActorCriticPolicy) -> None:
        layers = [layer for layer in policy.backbone if isinstance(layer, nn.Linear)] + [policy.policy_head]
        self._layers = [(_copied(layer.weight.t()), _copied(layer.bias)) for layer in layers]
        self._scratch = [np.empty((loops.BLOCK, len(bias)), np.float32) for _, bias in self._layers]
        self._log_std = _copied(policy.log_std) if policy.action_space.kind == "continuous" else None

    def act(
        self, observations: np.ndarray, generator: torch.Generator, deterministic: bool, among: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `ActorCriticPolicy.act`: observations [N,D] float32 or uint8 -> actions [N,A] float32 or [N] int64 and
        log_probs [N].

        among: (first, total): the position of these rows in the whole batch of observations.
        """
        count, heads = len(observations), self._heads(observations)
        drawn = torch.empty(among[1], heads.shape[1])
        rows, log_probs = slice(among[0], among[0] + count), np.empty(count, np.float32)
        if self._log_std is not None:
            noise = drawn.zero_() if deterministic else drawn.normal_(generator=generator)
            actions = np.empty_like(heads)
            loops.gaussian_choice()(heads, self._log_std, noise.numpy()[rows], actions, log_probs)
            return actions, log_probs
        races = drawn.fill_(1.0) if deterministic else drawn.exponential_(generator=generator)
        choices = np.empty(count, np.int64)
        loops.categorical_choice()(heads, races.numpy()[rows], choices, log_probs)
        return choices, log_probs

    def _heads(self, observations: np.ndarray) -> np.ndarray:
        """Means or logits [N,A]."""
        if observations.dtype == np.uint8:
            observations = observations.astype(np.float32) / np.float32(255)
        layer, tanh, outputs = loops.layer(), ppo.tanh(), observations
        for (weights, bias), scratch in zip(self._layers, self._scratch, strict=True):
            if outputs is not observations:
                tanh(outputs)
            inputs, outputs = outputs, np.empty((len(observations), len(bias)), np.float32)
            layer(inputs, weights, bias, outputs, scratch)
        return outputs


def _copied(tensor: Tensor) -> np.ndarray:
    return np.array(tensor.detach().numpy(), order="C")
