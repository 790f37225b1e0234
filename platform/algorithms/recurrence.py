"""The linear recurrence y_t = x_t + f y_{t+1} along rows, behind returns and GAE: step by step, or in chunks.

Step by step the factor may differ from position to position. In chunks it is one number per row, and the work is matrix
products: for long rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 32  # positions per matrix product: of a wider triangle more is zeros, of a narrower one more is carrying
WIDEST = 512  # if all rows have one factor: up to here one product is faster than a level of chunks
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def reverse_scan(terms: Tensor, factors: Tensor) -> Tensor:
    """y_t = terms_t + factors_t y_{t+1} over the last dimension of [B,T], y_T = 0: one operation per step."""
    result = terms.t().contiguous().clone()  # steps first, so that each one reads and writes neighbouring numbers
    columns = result.unbind(0)
    for column, factor, following in zip(
        reversed(columns[:-1]), reversed(factors.t().contiguous().unbind(0)[:-1]), reversed(columns[1:]), strict=True
    ):
        column.addcmul_(factor, following)
    return result.t()


def triangles(factor: Tensor, length: int, dtype: torch.dtype) -> list[Tensor]:
    """What `chunked_scan` multiplies rows of up to `length` with: f^(s - t) for s >= t, one matrix per level of chunks.

    `factor`: float64, a scalar or one per row [B]; the matrices are [C+1,C] or [B,C+1,C]. Their last row, s = C, is
    what each position of a chunk gets from the y behind it.
    """
    whole = length <= (CHUNK if factor.dim() else WIDEST)
    size = length if whole else CHUNK
    powers = factor[..., None] ** torch.arange(size + 1, device=factor.device)
    steps = torch.arange(size + 1, device=factor.device)
    distance = steps[:, None] - steps[:-1]
    triangle = torch.where(distance >= 0, powers[..., distance.clamp(min=0)], 0.0).to(dtype)
    return [triangle] if whole else [triangle, *triangles(powers[..., size], -(-length // size), dtype)]


def chunked_scan(terms: Tensor, levels: list[Tensor]) -> Tensor:
    """y_t = terms_t + factor y_{t+1} over the last dimension of [B,T], y_T = 0; `levels`: `triangles` of T or more.

    Inside a chunk y is a product with a triangular matrix, as if nothing followed. The first y of all chunks form a
    recurrence again, with factor^CHUNK, and tell each chunk what it gets from the next one.
    """
    rows, length = terms.shape
    triangle, *above = levels
    if not above:
        return (terms[:, None] @ triangle[..., :length, :length])[:, 0]
    chunks = F.pad(terms, (0, -length % CHUNK)).view(rows, -1, CHUNK) if length % CHUNK else terms.view(rows, -1, CHUNK)
    result = chunks @ triangle[..., :-1, :]
    heads = chunked_scan(result[..., 0], above)
    result[:, :-1].addcmul_(heads[:, 1:, None], triangle[..., -1:, :])
    return result.view(rows, -1)[:, :length]


def bit_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """All bits set where the bool `mask` is, in integers of the size of `dtype`: for `keep`."""
    return mask.view(torch.int8).neg().to(_INTEGERS[dtype.itemsize])


def keep(x: Tensor, bits: Tensor) -> Tensor:
    """`x` where the bits of `bit_mask` are set, 0 elsewhere, NaN or not: on random masks in a tenth of the time of
    torch.where, which branches."""
    return (x.view(bits.dtype) & bits).view(x.dtype)


def keep_(x: Tensor, bits: Tensor) -> Tensor:
    """`keep` in place; returns `x`."""
    x.view(bits.dtype).bitwise_and_(bits)
    return x
