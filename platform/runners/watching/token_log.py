"""The numbers of single tokens of the logged samples, for `tokens.jsonl`.

They are those that the update used; only `new_log_prob` is computed for the log. Not covered: when they are logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from rl_platform.records import RolloutBatch
from rl_platform.reporter import Token

LONGEST = 512  # tokens of a response that are logged


def tokens_of(batch: RolloutBatch, new_log_probs: Tensor | None, text_of: Callable[[int], str]) -> Iterator[Token]:
    """Yields the response tokens of every row of a batch with advantages, in order; those of a tool have no numbers.
    All rows of a trajectory have the number of its sample.

    new_log_probs: [B,T] after the update; None: not computed. text_of: from a token's id.
    """
    versions = batch.token_versions
    if versions is None and batch.versions is not None:
        versions = batch.versions[:, None].expand(batch.action_mask.shape)
    fields = {
        "rollout_log_prob": batch.rollout_log_probs,
        "log_prob": batch.log_probs,
        "new_log_prob": new_log_probs,
        "reference_log_prob": batch.reference_log_probs,
        "value": batch.values,
        "reward": batch.rewards,
        "advantage": batch.advantages,
        "return_": batch.returns,
        "version": versions,
    }
    known = {name: tensor.tolist() for name, tensor in fields.items() if tensor is not None}
    ids, lengths, sampled = (
        each.tolist() for each in (batch.inputs["tokens"], batch.inputs["lengths"], batch.action_mask)
    )
    sample = -1
    for row, length in enumerate(lengths):
        sample += batch.continues is None or not bool(batch.continues[row])
        first = sampled[row].index(True) if any(sampled[row]) else length
        for position in range(first, min(length, first + LONGEST)):
            numbers = {name: rows[row][position] for name, rows in known.items()} if sampled[row][position] else {}
            yield Token(sample, text_of(ids[row][position]), **numbers)
