"""Acting with a small policy on a CPU by compiled loops instead of tensor operations.

For a few environments this takes microseconds; a dozen tensor operations would cost more than they compute. The results
equal those of `ActorCriticPolicy.act` up to rounding, from the same random numbers. Every row goes through the same
instructions in the same order, so an action does not depend on the other rows of the batch. Not covered: training
(accel/compiled_training.py), and policies other than a small MLP with tanh.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from rl_platform.accel import compiled_ppo as ppo
from rl_platform.accel.compiling import IN_ORDER, Array, compiled_loops
from rl_platform.models.policy import ActorCriticPolicy, Tanh

BLOCK = 4  # rows that share a pass over the weights
LARGEST = 2**15  # parameters; above, torch is faster for a few dozen rows


def is_plain(policy: nn.Module) -> bool:
    """Returns whether the policy is an MLP with tanh and two linear heads: Gaussian with free deviations, or
    categorical."""
    if type(policy) is not ActorCriticPolicy or type(policy.backbone) is not nn.Sequential:
        return False
    if policy.action_space.kind == "multi_discrete":
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
    """Returns whether `CompiledPolicy` can act in the policy's place."""
    small = sum(parameter.numel() for parameter in policy.parameters()) <= LARGEST
    return small and device.type == "cpu" and is_plain(policy) and policy.policy_head.weight.dtype == torch.float32


class CompiledPolicy:
    """A copy of the policy's present weights; new weights need a new copy."""

    def __init__(self, policy: ActorCriticPolicy) -> None:
        layers = [layer for layer in policy.backbone if isinstance(layer, nn.Linear)] + [policy.policy_head]
        self._layers = [(_copied(layer.weight.t()), _copied(layer.bias)) for layer in layers]
        self._scratch = [np.empty((BLOCK, len(bias)), np.float32) for _, bias in self._layers]
        self._log_std = _copied(policy.log_std) if policy.action_space.kind == "continuous" else None

    def draw(self, rows: int, generator: torch.Generator | None) -> np.ndarray:
        """Returns the random numbers [rows,A] of `act`. generator None: those of the most likely actions."""
        drawn = torch.empty(rows, len(self._layers[-1][1]))
        if self._log_std is not None:
            drawn = drawn.zero_() if generator is None else drawn.normal_(generator=generator)
        else:
            drawn = drawn.fill_(1.0) if generator is None else drawn.exponential_(generator=generator)
        return drawn.numpy()

    def act(self, observations: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `ActorCriticPolicy.act`: observations [N,D] float32 or uint8 and random numbers [N,A] -> actions [N,A]
        float32 or [N] int64, and log_probs [N]."""
        count, heads = len(observations), self._heads(observations)
        log_probs = np.empty(count, np.float32)
        if self._log_std is not None:
            actions = np.empty_like(heads)
            gaussian_choice()(heads, self._log_std, drawn, actions, log_probs)
            return actions, log_probs
        choices = np.empty(count, np.int64)
        categorical_choice()(heads, drawn, choices, log_probs)
        return choices, log_probs

    def _heads(self, observations: np.ndarray) -> np.ndarray:
        """Returns means or logits [N,A]."""
        if observations.dtype == np.uint8:
            observations = observations.astype(np.float32) / np.float32(255)
        multiply, tanh, outputs = layer(), ppo.tanh(), observations
        for (weights, bias), scratch in zip(self._layers, self._scratch, strict=True):
            if outputs is not observations:
                tanh(outputs)
            inputs, outputs = outputs, np.empty((len(observations), len(bias)), np.float32)
            multiply(inputs, weights, bias, outputs, scratch)
        return outputs


def _copied(tensor: Tensor) -> np.ndarray:
    return np.array(tensor.detach().numpy(), order="C")


@compiled_loops(IN_ORDER)
def layer(inputs: Array, weights: Array, bias: Array, outputs: Array, scratch: Array) -> None:
    """(inputs [N,I], weights [I,O], bias [O], out: outputs [N,O], scratch [BLOCK,O]), all float32."""
    rows, width = outputs.shape
    a, b, c, d = scratch[0], scratch[1], scratch[2], scratch[3]
    for first in range(0, rows, BLOCK):
        last = rows - 1  # replaces rows beyond the end, so that all rows use the same instructions
        p, q = inputs[first], inputs[min(first + 1, last)]
        r, s = inputs[min(first + 2, last)], inputs[min(first + 3, last)]
        for j in range(width):
            a[j] = b[j] = c[j] = d[j] = bias[j]
        for i in range(len(weights)):
            line = weights[i]
            for j in range(width):
                weight = line[j]
                a[j] += p[i] * weight
                b[j] += q[i] * weight
                c[j] += r[i] * weight
                d[j] += s[i] * weight
        count = min(BLOCK, rows - first)
        outputs[first : first + count] = scratch[:count]


@compiled_loops(IN_ORDER)
def gaussian_choice(means: Array, log_std: Array, noise: Array, actions: Array, log_probs: Array) -> None:
    """(means [N,A], log_std [A], noise [N,A], out: actions [N,A], log_probs [N])."""
    rows, width = means.shape
    deviations = np.exp(log_std)
    # log N(a; mu, sigma) = -sum_i (noise_i^2 / 2 + log sigma_i + log sqrt(2 pi))
    constant = np.float32(log_std.sum() + width * ppo.HALF_LOG_2_PI)
    for row in range(rows):
        square = np.float32(0.0)
        for column in range(width):
            drawn = noise[row, column]
            actions[row, column] = means[row, column] + drawn * deviations[column]
            square += drawn * drawn
        log_probs[row] = np.float32(-0.5) * square - constant


@compiled_loops(IN_ORDER)
def categorical_choice(logits: Array, races: Array, choices: Array, log_probs: Array) -> None:
    """(logits [N,A], races [N,A], out: choices [N] int64, log_probs [N]): winners of exponential races, the argmax of
    p / race, which is distributed as p; races of 1 give the most likely one."""
    rows, width = logits.shape
    for row in range(rows):
        largest = logits[row, 0]
        for column in range(1, width):
            largest = max(largest, logits[row, column])
        total, best, chosen = np.float32(0.0), -np.float32(np.inf), 0
        for column in range(width):
            total += np.exp(logits[row, column] - largest)
            score = logits[row, column] - np.log(races[row, column])
            if score > best:
                best, chosen = score, column
        choices[row] = chosen
        log_probs[row] = logits[row, chosen] - largest - np.log(total)
