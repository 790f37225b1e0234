"""Squashes Gaussian samples u into bounds: a = low + (high - low) (tanh(u) + 1) / 2.

As in Haarnoja et al., "Soft Actor-Critic" (2018), appendix C. Policies sample and store u, because u cannot be
recovered exactly from an action near a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_NODES = 16  # of the quadrature; its error is 1e-5 at a standard deviation of 1 and 3e-3 at 2


class Squash(nn.Module):
    """Maps u to actions within `low` and `high` [A]. It has no parameters and saves no buffers."""

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__()
        scale = (torch.tensor(high, dtype=torch.float64) - torch.tensor(low, dtype=torch.float64)) / 2
        middle = torch.tensor(low, dtype=torch.float64) + scale
        nodes, weights = np.polynomial.hermite.hermgauss(_NODES)
        buffers = {
            "scale": scale.float(),
            "middle": middle.float(),
            # E f(z), z ~ N(0, 1), is about sum_k w_k f(sqrt(2) x_k) / sqrt(pi)
            "nodes": torch.from_numpy(nodes * math.sqrt(2)).float(),
            "weights": torch.from_numpy(weights / math.sqrt(math.pi)).float(),
        }
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, u: Tensor) -> Tensor:
        """u [...,A] -> actions [...,A] within the bounds."""
        return self.middle + self.scale * torch.tanh(u)

    def log_slope(self, u: Tensor) -> Tensor:
        """Returns log |da/du| [...,A], finite for every u. log p(a) = log p(u) - log |da/du|."""
        # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)), which avoids cancellation for large |u|
        return self.scale.log() + 2 * (math.log(2) - u - F.softplus(-2 * u))

    def mean_log_slope(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Returns E log |da/du| [...,A] over u ~ N(mean, exp(log_std)): the entropy of a minus that of u.

        There is no closed form. Gauss-Hermite quadrature is deterministic and differentiable in both arguments.
        """
        u = mean[..., None] + log_std.exp()[..., None] * self.nodes
        return (self.log_slope(u.transpose(-1, -2)) * self.weights[:, None]).sum(-2)
