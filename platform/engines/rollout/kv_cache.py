"""Paged key-value cache: full pages, which sequences may share, and one tail page per slot that is written to.

Memory grows with the tokens and shrinks as sequences end. It is that of all cached tokens, with shared pages counted
once, and two or three pages per slot. The pages of a segment are contiguous, so `attention` reads them in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64  # tokens


class Pool:
    """Pages in segments of `segment_pages`. Pages in use come first. `like`: a tensor of a page's shape."""

    def __init__(self, like: Tensor, segment_pages: int) -> None:
        self.like, self.segment_pages = like, segment_pages
        self.pages: list[Page] = []
        self.segments: list[Tensor] = []  # [layers, 2, segment_pages, heads, PAGE, head_dim]
        self.moves = 0  # how often a page was copied to another place

    def take(self) -> Page:
        """Allocates a page with undefined contents."""
        if len(self.pages) == len(self.segments) * self.segment_pages:
            layers, both, *rest = self.like.shape
            self.segments.append(self.like.new_empty(layers, both, self.segment_pages, *rest))
        self.pages.append(Page(self, len(self.pages)))
        return self.pages[-1]

    def free(self, page: Page) -> None:
        """Frees a page; the last page is copied into its place."""
        last = self.pages[-1]
        if last is not page:
            page.data.copy_(last.data)
            last.place, self.pages[page.place] = page.place, last
            self.moves += 1
        self.pages.pop()
        if len(self.pages) <= (len(self.segments) - 1) * self.segment_pages:
            self.segments.pop()


@dataclass(eq=False)
class Page:
    """A full page, which is read-only. holders: the number of prompts and sequences that contain it."""

    pool: Pool
    place: int
    holders: int = 1

    @property
    def data(self) -> Tensor:
        """A view [layers, 2, heads, page, head_dim], valid until a page of the pool is freed."""
        segment, place = divmod(self.place, self.pool.segment_pages)
        return self.pool.segments[segment][:, :, place]


class KVCache:
    """tails [layers, 2, slots, heads, page, head_dim]: the pages that running sequences, in the first slots, write to.

    page: the number of tokens of a page.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.page = slots, PAGE
        # zeros, because masked positions are read too and must be finite
        self.tails = torch.zeros(layers, 2, slots, heads, PAGE, head_dim, dtype=dtype, device=device)
        self.layers = [tuple(layer) for layer in self.tails]  # keys, values
        self.pools: dict[int, Pool] = {}

    def take(self, readers: int = 1) -> Page:
        """Allocates a page that up to `readers` running sequences will contain.

        Pages with a similar number of readers share a pool, because each page of a pool is read for as many sequences
        as the page with the most readers has.
        """
        kind = 1 << (readers - 1).bit_length()
        if kind not in self.pools:
            self.pools[kind] = Pool(self.tails[:, :, 0], max(1, self.slots // kind))
        return self.pools[kind].take()

    def hold(self, pages: Iterable[Page]) -> list[Page]:
        """Adds a holder to each page and returns the pages."""
        held = list(pages)
        for page in held:
            page.holders += 1
        return held

    def release(self, pages: Iterable[Page]) -> None:
        """Removes a holder from each page; pages without holders are freed."""
        for page in pages:
            page.holders -= 1
            if not page.holders:
                page.pool.free(page)

    def full_tail(self, slot: int) -> Page:
        """Copies the full tail of a slot into a new page, which it returns."""
        page = self.take()
        page.data.copy_(self.tails[:, :, slot])
        return page

    def begin(self, slot: int, tail: Tensor) -> None:
        """Copies `tail` [layers, 2, heads, page, head_dim] into the slot's tail."""
        self.tails[:, :, slot] = tail

    def move(self, source: int, target: int) -> None:
        """Copies the tail of slot `source` to slot `target`."""
        self.tails[:, :, target] = self.tails[:, :, source]
