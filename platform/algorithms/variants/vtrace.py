"""V-trace (Espeholt et al. 2018): advantages and value targets for actions of an older policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from rl_platform.algorithms.gae import coefficients, scan

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@torch.no_grad()
def vtrace(
    rewards: FloatBT,
    values: FloatBT,
    mask: BoolBT,
    gamma: float,
    lam: float,
    weights: FloatBT,
    ends: BoolBT | None,
    end_values: FloatBT | None,
) -> tuple[FloatBT, FloatBT]:
    """Returns advantages, and value targets v_t of the policy before the update, both [B,T].

    rho_t = `weights` [B,T]: the truncated importance ratios of that policy and the one that acted.

        delta_t    = r_t + gamma V_{t+1} - V_t
        v_t - V_t  = rho_t delta_t + gamma lam min(rho_t, 1) (v_{t+1} - V_{t+1})
        A_t        = delta_t + gamma lam (v_{t+1} - V_{t+1})

    The targets are those of the paper with c_t = lam min(1, rho_t) (remark 2). The paper's A_t = r_t + gamma v_{t+1} -
    V_t has no lam. The lam here is that of DeepMind's rlax: with all weights 1 the result equals `gae`. The policy loss
    multiplies A_t by rho_t. Masks and ends are those of `gae`.
    """
    errors, decays = coefficients(rewards, values, mask, gamma, lam, ends, end_values)
    rho = torch.where(mask, weights.double(), 1.0)
    corrections = scan(rho * errors, decays * rho.clamp(max=1.0))
    advantages = torch.where(mask, errors + decays * F.pad(corrections[:, 1:], (0, 1)), 0.0)
    targets = torch.where(mask, values + corrections, 0.0)
    return advantages.to(values.dtype), targets.to(values.dtype)
