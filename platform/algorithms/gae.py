"""Generalised advantage estimation (Schulman et al. 2016) with masks carried forward, plain and decoupled.

Whitening is not here, nor the choice of lambdas from a config: see advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_platform import acceleration

COMPILE_FROM = 2**22  # positions of a batch from which compiling a loop is won back, within a hundred batches or so


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    ends: Tensor | None = None,
    end_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns; every tensor [B,T].

    Scanning each row from its end with v_next = 0 and g = 0:

        where ends_t:  v_next = end_values_t, g = 0
        where mask_t:  g = r_t + gamma v_next - V_t + gamma lam g;  A_t = g;  v_next = V_t
        elsewhere:     both carried on unchanged, A_t = 0

    and returns = (A + V) * mask. Equal to the textbook recursion on the active positions alone. `lam` is a number or
    one per row [B]. `ends`, `end_values`: an episode or the rollout ends after this position, and the value of the
    state that follows (0 if the episode terminated); None: one episode per row, worth 0 after its end. Values outside
    `mask`, and end values where nothing ends, may be anything.
    """
    compiled = None
    if ends is not None or mask.numel() >= COMPILE_FROM:  # an embodied run, which has ends, compiles other loops anyway
        compiled = acceleration.gae_function(values)
    return (compiled or _plain_gae)(rewards, values, mask, gamma, lam, ends, end_values)


def decoupled_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam_policy: float | Tensor,
    lam_value: float,
    ends: Tensor | None = None,
    end_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages with `lam_policy`, returns with `lam_value` (VAPO, Yue et al. 2025); otherwise as `gae`."""
    estimated, returns = gae(rewards, values, mask, gamma, lam_policy, ends, end_values)
    if isinstance(lam_policy, Tensor) or lam_policy != lam_value:
        returns = gae(rewards, values, mask, gamma, lam_value, ends, end_values)[1]
    return estimated, returns


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """[B] clip(1 - 1 / (alpha l), 0, 1) with l active positions in the row of `mask` [B,T] (VAPO, Yue et al. 2025).

    0 for l <= 1 / alpha: of such a response only the last position sees an outcome reward.
    """
    return (1.0 - 1.0 / (alpha * mask.sum(dim=1)).clamp(min=1.0)).clamp(0.0, 1.0)


def _plain_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    ends: Tensor | None,
    end_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`gae` position by position. float64: in float32 an advantage is rounded at the size of V, such as 10^4."""
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    next_value = next_advantage = values.new_zeros(len(values), dtype=torch.float64)
    for t in reversed(range(values.shape[1])):
        if ends is not None and end_values is not None:
            next_value = torch.where(ends[:, t], end_values[:, t].double(), next_value)
            next_advantage = next_advantage.masked_fill(ends[:, t], 0.0)
        active, value = mask[:, t], values[:, t].double()
        # delta_t = r_t + gamma V_{t+1} - V_t
        error = rewards[:, t].double() + gamma * next_value - value
        # A_t = delta_t + gamma lambda A_{t+1}
        advantage = error + gamma * lam * next_advantage
        # G_t = A_t + V_t
        advantages[:, t], returns[:, t] = advantage, advantage + value
        next_value = torch.where(active, value, next_value)
        next_advantage = torch.where(active, advantage, next_advantage)
    return advantages.masked_fill_(~mask, 0.0), returns.masked_fill_(~mask, 0.0)
