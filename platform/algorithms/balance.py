"""Divides the rows of a mini-batch over the ranks, so that all finish at about the same time.

Rows move between the ranks of one mini-batch, never to another mini-batch. The batch of an optimizer step therefore
does not depend on the number of ranks or on balancing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def sequence_cost(length: int, hidden_size: int) -> int:
    """Returns 6 h L + L^2: matrix products and attention of one transformer layer over L tokens, up to a factor."""
    return 6 * hidden_size * length + length * length


def contiguous_parts(count: int, parts: int) -> list[range]:
    """Returns 0 to `count` - 1 in `parts` stretches whose sizes differ by at most one: the shares without balancing."""
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def balance_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]], hidden_size: int) -> dict[str, float]:
    """Returns metrics of how evenly the work of rows with these `lengths` is spread over ranks with these `parts`.

    balance/min, mean, max: tokens of a rank; before_max, after_max: work of the busiest rank over the mean, had the
    rows been cut in order and as they are shared (1 is perfect); imbalance: share of the time that the ranks wait for
    the busiest one.
    """
    costs = [sequence_cost(length, hidden_size) for length in lengths]
    tokens = [sum(lengths[row] for row in part) for part in parts]
    mean = sum(costs) / len(parts)
    in_order, shared = (
        max(sum(costs[row] for row in part) for part in shares) / mean
        for shares in (contiguous_parts(len(lengths), len(parts)), parts)
    )
    return {
        "balance/min": float(min(tokens)),
        "balance/mean": sum(tokens) / len(parts),
        "balance/max": float(max(tokens)),
        "balance/before_max": in_order,
        "balance/after_max": shared,
        "balance/imbalance": 1.0 - 1.0 / shared,
    }


def balanced_parts(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Returns the indices of `costs` in `parts` ascending lists of similar sum, whose sizes differ by at most one.

    Largest differencing with equal counts (Karmarkar and Karp 1982, Michiels et al. 2003): the sorted numbers are cut
    into tuples with one number for each part; the two tuples that differ most within are joined, the largest part of
    one with the smallest of the other, until one tuple is left. Equal input gives equal output.
    """
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []  # (-spread, tie-break, [(sum, indices)] descending)
    for start in range(0, len(order), parts):
        block = [(costs[index], [index]) for index in order[start : start + parts]]
        block += [(0, [])] * (parts - len(block))
        heapq.heappush(heap, (block[-1][0] - block[0][0], start, block))
    while len(heap) > 1:
        (_, start, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], start, joined))
    return [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(parts)]
