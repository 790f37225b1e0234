"""Generalised advantage estimation (Schulman et al. 2016) with masks carried forward, plain and decoupled.

Whitening is not here, nor the choice of lambdas from a config: see advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_platform.accel.compiled_gae import compiled_gae, compiles
from rl_platform.algorithms.recurrence import (
    CHUNK,
    bit_mask,
    chunked_scan,
    keep,
    keep_,
    reverse_scan,
    triangles,
)

LONG_ROW = 128  # positions from which chunks are faster than steps
COMPILE_FROM = 2**22  # positions of a batch from which compiling a loop is won back, within a hundred batches or so
BLOCK = 2**18  # positions of the rows computed together: what a block needs stays in the cache


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
    # Every path scans TD errors in float64. Scanned in float32, or as returns from which V is subtracted at the end, an
    # advantage is rounded at the size of V at each step, which for |V| of 10^4 can be its standard deviation.
    if ends is not None and end_values is not None:
        scan = compiled_gae if compiles(values) else _stepwise  # an embodied run compiles other loops anyway
        return scan(rewards, values, mask, gamma, lam, ends, end_values)
    if mask.shape[1] < LONG_ROW:
        return _stepwise(rewards, values, mask, gamma, lam)
    if mask.numel() >= COMPILE_FROM and compiles(values):
        return compiled_gae(rewards, values, mask, gamma, lam)
    return _in_chunks(rewards, values, mask, gamma, lam)


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


def _stepwise(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    ends: Tensor | None = None,
    end_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dtype, bits = values.dtype, bit_mask(mask, torch.float64)
    rewards, values = keep(rewards.double(), bits), keep(values.double(), bits)
    factors = torch.where(mask, gamma * _column(lam, values.device), 1.0)
    if ends is None or end_values is None:
        following = _shifted(_carried(values, mask))
    else:  # at an end the end value follows, whether the position is active or not
        reached = torch.where(ends, end_values.double(), 0.0)
        following = torch.where(ends, reached, _shifted(_carried(torch.where(mask, values, reached), mask | ends)))
        factors = torch.where(ends, 0.0, factors)
    # delta_t = r_t + gamma v_next - V_t;  g_t = delta_t + gamma lam g_{t+1}, carried on where masked
    errors = keep(rewards + (gamma * following - values), bits)
    estimated = keep(reverse_scan(errors, factors).contiguous(), bits)
    return estimated.to(dtype), (estimated + values).to(dtype)


def _in_chunks(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Active positions are moved together, so that a row has one factor throughout; a block of rows at a time."""
    estimated, returns = torch.empty_like(values), torch.empty_like(values)
    weight = _column(lam, values.device)
    shared = weight.dim() == 0  # by all rows
    factor = gamma * (weight if shared else weight[:, 0])
    widest = _slots(mask.shape[1])
    levels = triangles(factor, widest, torch.float64) if shared else []
    rows = max(1, BLOCK // mask.shape[1])
    for start in range(0, len(mask), rows):
        block = slice(start, start + rows)
        if not shared:
            levels = triangles(factor[block], widest, torch.float64)
        bits = bit_mask(mask[block], torch.float64)
        reward, value = keep(rewards[block].double(), bits), keep(values[block].double(), bits)
        slots = mask[block].cumsum(dim=1)  # of an active position: its place among them, from 1
        packed = value.new_zeros(2, len(slots), _slots(int(slots[:, -1].max())))
        for row, given in zip(packed, (reward, value), strict=True):
            row.scatter_add_(1, slots, given)  # a masked position shares the slot of the active one before it, adds 0
        errors, worth = packed  # delta_t = r_t + gamma V_{t+1} - V_t over the active positions alone
        errors.sub_(worth)
        errors[:, :-1].add_(worth[:, 1:], alpha=gamma)
        found = keep_(torch.gather(chunked_scan(errors, levels), 1, slots), bits)
        estimated[block] = found
        returns[block] = found.add_(value)
    return estimated, returns


def _slots(active: int) -> int:
    """Whole chunks for so many active positions of a row; slot 0 and the one behind the last stay empty."""
    return -(-(active + 2) // CHUNK) * CHUNK


def _column(lam: float | Tensor, device: torch.device) -> Tensor:
    """float64: a scalar, or [B,1] for one number per row."""
    tensor = torch.as_tensor(lam, dtype=torch.float64, device=device)
    return tensor[:, None] if tensor.dim() else tensor


def _carried(x: Tensor, known: Tensor) -> Tensor:
    """[B,T] x at the first position from here on that is `known`, 0 where there is none."""
    positions = torch.arange(x.shape[1], device=x.device)
    first = torch.where(known, positions, x.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return torch.cat((x, torch.zeros_like(x[:, :1])), dim=1).gather(1, first)


def _shifted(x: Tensor) -> Tensor:
    """x_{t+1} of [B,T], 0 at the end."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)
