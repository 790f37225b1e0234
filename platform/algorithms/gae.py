"""Generalised advantage estimation (Schulman et al. 2016) with masks carried forward: plain and decoupled.

Whitening is not here, nor the choice of lambdas from a config: see advantages.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_platform import acceleration

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB, FloatBT

COMPILE_FROM = 2**22  # positions of a batch from which compiling a loop is won back, within a hundred batches or so


@torch.no_grad()
def gae(
    rewards: FloatBT,
    values: FloatBT,
    mask: BoolBT,
    gamma: float,
    lam: float | FloatB,
    ends: BoolBT | None = None,
    end_values: FloatBT | None = None,
) -> tuple[FloatBT, FloatBT]:
    """Returns advantages and returns [B,T], both 0 outside `mask`.

    Scanning each row from its end with v_next = 0 and g = 0:

        where ends_t:  v_next = end_values_t, g = 0
        where mask_t:  g = r_t + gamma v_next - V_t + gamma lam g;  A_t = g;  v_next = V_t
        elsewhere:     both carried on unchanged, A_t = 0

    and returns = (A + V) * mask. Equal to the textbook recursion on the active positions alone. `lam` is a number or
    one per row [B]. `ends`, `end_values`: an episode or the rollout ends after this position, and the value of the
    state that follows (0 if the episode terminated); None: one episode per row, worth 0 after its end. Values outside
    `mask`, and end values where nothing ends, may be anything. Schulman et al. 2016, arXiv 1506.02438, eq. 16.
    """
    compiled = None
    if ends is not None or mask.numel() >= COMPILE_FROM:  # an embodied run, which has ends, compiles other loops anyway
        compiled = acceleration.find("gae_function", values)
    return (compiled or _plain_gae)(rewards, values, mask, gamma, lam, ends, end_values)


def decoupled_gae(
    rewards: FloatBT,
    values: FloatBT,
    mask: BoolBT,
    gamma: float,
    lam_policy: float | FloatB,
    lam_value: float,
    ends: BoolBT | None = None,
    end_values: FloatBT | None = None,
) -> tuple[FloatBT, FloatBT]:
    """Returns `gae` with `lam_policy` for the advantages and `lam_value` for the returns (VAPO, Yue et al. 2025)."""
    estimated, returns = gae(rewards, values, mask, gamma, lam_policy, ends, end_values)
    if isinstance(lam_policy, Tensor) or lam_policy != lam_value:
        returns = gae(rewards, values, mask, gamma, lam_value, ends, end_values)[1]
    return estimated, returns


def _plain_gae(
    rewards: FloatBT,
    values: FloatBT,
    mask: BoolBT,
    gamma: float,
    lam: float | FloatB,
    ends: BoolBT | None,
    end_values: FloatBT | None,
) -> tuple[FloatBT, FloatBT]:
    """Computes `gae` by `scan`."""
    estimated = scan(*coefficients(rewards, values, mask, gamma, lam, ends, end_values))
    advantages = torch.where(mask, estimated, 0.0)
    return advantages.to(values.dtype), torch.where(mask, advantages + values, 0.0).to(values.dtype)


def coefficients(
    rewards: FloatBT,
    values: FloatBT,
    mask: BoolBT,
    gamma: float,
    lam: float | FloatB,
    ends: BoolBT | None,
    end_values: FloatBT | None,
) -> tuple[FloatBT, FloatBT]:
    """Returns b_t and a_t [B,T] of the linear recursion A_t = b_t + a_t A_{t+1}.

    Both are float64, because a float32 difference of values near 10^4 has an error near 10^-3.
    """
    if ends is None or end_values is None:
        ends, end_values = torch.zeros_like(mask), torch.zeros_like(values)
    steps = values.shape[1]
    # known_t: the first position from t on that is active or an end; `steps`: none, so the value that follows is 0
    known = torch.where(mask | ends, torch.arange(steps, device=values.device), steps)
    known = F.pad(known.flip(1).cummin(dim=1).values.flip(1), (0, 1), value=steps)
    known_values = F.pad(torch.where(mask, values, end_values).double(), (0, 1))
    following = torch.where(ends, end_values.double(), known_values.gather(1, known[:, 1:]))
    # b_t = delta_t = r_t + gamma V_{t+1} - V_t and a_t = gamma lambda; a_t = 0 where an episode ends
    errors = torch.where(mask, rewards.double() + gamma * following - values.double(), 0.0)
    decays = gamma * torch.as_tensor(lam, dtype=torch.float64, device=values.device).view(-1, 1)
    return errors, torch.where(mask, decays, 1.0).masked_fill(ends, 0.0)


def scan(errors: FloatBT, decays: FloatBT) -> FloatBT:
    """Returns A_t = errors_t + decays_t A_{t+1} of all positions, from the last one. May overwrite `errors`."""
    estimated = errors.T.contiguous()
    columns = list(zip(estimated.unbind(), decays.T.contiguous().unbind(), strict=True))
    for (following_advantage, _), (advantage, decay) in pairwise(reversed(columns)):
        advantage.addcmul_(decay, following_advantage)
    return estimated.T
