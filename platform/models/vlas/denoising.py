"""Denoising of action chunks by flow matching, with Gaussian steps whose log-probs PPO can use.

A chunk is denoised in N steps from x_T ~ N(0, I) at t = 1 to t = 0 with the velocity v(x, t) of a model:
x_t = (1 - t) a + t noise, v = noise - a. Without noise a step is Euler's, x - v / N. The kinds of noise are those of
pi_RL (Chen et al., 2025): `flow_sde` (Liu et al., "Flow-GRPO", 2025), `flow_cps` (Wang and Yu, 2025) and `flow_noise`
(Zhang et al., "ReinFlow", 2025). Not covered: the model, see `flow_policy.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_platform.config.schema.models import Flow
from rl_platform.models.policy import LOG_SQRT_2_PI

LEAST_STD, MOST_STD = 0.08, 0.16  # of flow_noise, as pi_RL bounds it


@dataclass(frozen=True)
class Denoising:
    """The time grid of N steps, and which of them draw noise."""

    flow: Flow
    steps: int

    @property
    def noisy(self) -> int:
        """Number of first steps that may draw noise; the last one of flow_cps has deviation 0."""
        return self.steps - 1 if self.flow.method == "flow_cps" else self.steps

    @property
    def recorded(self) -> int:
        """S, the steps of a chunk that draw noise."""
        return self.noisy if self.flow.stochastic_steps == "all" else 1

    def times(self, device: torch.device) -> Tensor:
        """[N+1] float32, from 1 to 0."""
        return torch.tensor([1.0 - step / self.steps for step in range(self.steps + 1)], device=device)

    def euler(self, x: Tensor, velocity: Tensor) -> Tensor:
        """x [B,H,A] after a step without noise."""
        return x - velocity / self.steps

    def gaussian(self, x: Tensor, velocity: Tensor, steps: Tensor, learned: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [B,H,A] of a noisy step.

        x, velocity [B,H,A]; steps [B] int64: the number of each row's step, from 0; learned [B,H,A]: deviations of
        flow_noise.
        """
        d, level = 1 / self.steps, self.flow.noise_level
        t = (1 - steps * d).to(x.dtype)[:, None, None]
        noise = x + velocity * (1 - t)  # x1, the noise that x_t and v imply; x0 = x - v t are the actions
        mean = self.euler(x, velocity)
        if self.flow.method == "flow_sde":
            # s = eta sqrt(t / (1 - t)); mean = x - v d - x1 s^2 d / 2t; std = s sqrt(d). At t = 1 the denominator is d
            square = level**2 * t / torch.where(steps[:, None, None] == 0, torch.full_like(t, d), 1 - t)
            return mean - noise * square * d / (2 * t), (square * d).sqrt().expand_as(x)
        if self.flow.method == "flow_cps":
            # mean = x0 (1 - t + d) + x1 (t - d) cos(pi eta / 2); std = (t - d) sin(pi eta / 2)
            angle, rest = math.pi * level / 2, t - d
            return mean - noise * rest * (1 - math.cos(angle)), (rest * math.sin(angle)).expand_as(x)
        assert learned is not None
        return mean, learned


def bounded_std(output: Tensor) -> Tensor:
    """Outputs of a layer -> deviations between LEAST_STD and MOST_STD."""
    return LEAST_STD + (MOST_STD - LEAST_STD) * (torch.tanh(output) + 1) / 2


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(x; mean, std) of each number."""
    return -0.5 * ((x - mean) / std).square() - std.log() - LOG_SQRT_2_PI


def entropy(std: Tensor) -> Tensor:
    """Entropy of N(., std) of each number."""
    return std.log() + 0.5 + LOG_SQRT_2_PI
