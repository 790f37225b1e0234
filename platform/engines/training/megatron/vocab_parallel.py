"""Log-probabilities, entropies and KL divergence with an output matrix whose rows are split over ranks.

Full logits never exist. A rank computes the logits of its part of the vocabulary, for one chunk of tokens at a time. An
all-reduce sums three numbers per token. Every rank gets all results.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rl_platform.models.context.context_parallel import SumOverRanks
from rl_platform.models.language import Statistic, in_chunks


def vocab_parallel_log_probs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int,
    temperature: float,
    statistic: Statistic,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns log-probs [K] float32 of `targets` [K] given `states` [K,H], and a statistic [K] or None.

    `weight` [V_r,H]: this rank's rows, for the tokens from `first` on. Logits are divided by `temperature`. The
    gradient of `states` is this rank's part. `group` None: this rank holds the whole vocabulary.
    """
    parts = in_chunks(_chunk, (states, targets), weight, first, temperature, statistic, group)
    log_probs = torch.cat([part[0] for part in parts])
    return log_probs, None if statistic == "none" else torch.cat([part[1] for part in parts])


def vocab_parallel_full_kl(
    states: Tensor,
    weight: Tensor,
    reference_states: Tensor,
    reference_weight: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """As `models.language.full_kl_of_states`, [K] float32, with this rank's rows in `weight` and `reference_weight`.

    `states` [K,H] and `reference_states` [K,G] are equal on all ranks. The gradient of `states` is this rank's part.
    """
    return torch.cat(in_chunks(_kl_chunk, (states, reference_states), weight, reference_weight, temperature, group))


def _kl_chunk(
    states: Tensor,
    reference_states: Tensor,
    weight: Tensor,
    reference_weight: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    logits = F.linear(states, weight).float() / temperature
    reference = F.linear(reference_states, reference_weight).float() / temperature
    largest = torch.stack([logits.detach().amax(dim=-1), reference.amax(dim=-1)])
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits, reference = logits - largest[0][:, None], reference - largest[1][:, None]
    odds = logits.exp()
    parts = torch.stack([odds.sum(-1), (odds * (logits - reference)).sum(-1), reference.exp().sum(-1)])
    total, difference, reference_total = _sum_over_ranks(parts, group)
    # KL = sum_v p_v (z_v - y_v) - log sum_v exp z_v + log sum_v exp y_v
    return difference / total - total.log() + reference_total.log()


def _chunk(
    states: Tensor,
    targets: Tensor,
    weight: Tensor,
    first: int,
    temperature: float,
    statistic: Statistic,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    logits = F.linear(states, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    largest = logits.detach().amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits = logits - largest[:, None]
    own = (targets >= first) & (targets < first + len(weight))
    target = logits.gather(1, torch.where(own, targets - first, 0)[:, None]).squeeze(1)
    odds = logits.exp()
    sums = [odds.sum(-1), torch.where(own, target, 0.0)]
    if statistic == "squared_probs":
        sums.append(odds.square().sum(-1))
    elif statistic != "none":
        z, e = (logits, odds) if statistic == "entropy_gradient" else (logits.detach(), odds.detach())
        sums.append((e * z).sum(-1))
    total, target, *expected = _sum_over_ranks(torch.stack(sums), group)
    norm = total.log()
    if statistic == "none":
        return target - norm, norm
    if statistic == "squared_probs":  # sum_v softmax(z)_v^2
        return target - norm, expected[0] / total.square()
    # H = log sum_v exp z_v - sum_v softmax(z)_v z_v, which is invariant to shifts of z
    entropies = norm - expected[0] / total
    return target - norm, entropies if statistic == "entropy_gradient" else entropies.detach()


def _sum_over_ranks(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return parts if group is None else SumOverRanks.apply(parts, group)
