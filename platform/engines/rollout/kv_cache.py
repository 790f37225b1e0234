"""Keys and values of running sequences: full pages, which sequences may share, and one page of each to write in.

Memory is taken as tokens come and given back as sequences end: it is that of the tokens held, full pages that several
sequences begin with counted once, and of two or three pages per slot. Pages lie side by side without gaps, so
`attention` reads them where they are, whoever they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64  # tokens


class Pool:
    """Pages in segments of `segment_pages` each; those in use have the first places. `like`: a page's tensor."""

    def __init__(self, like: Tensor, segment_pages: int) -> None:
        self.like, self.segment_pages = like, segment_pages
        self.pages: list[Page] = []
        self.segments: list[Tensor] = []  # [layers, 2, segment_pages, heads, PAGE, head_dim]

    def take(self) -> Page:
        """One more page; what it contains is undefined."""
        if len(self.pages) == len(self.segments) * self.segment_pages:
            layers, both, *rest = self.like.shape
            self.segments.append(self.like.new_empty(layers, both, self.segment_pages, *rest))
        self.pages.append(Page(self, len(self.pages)))
        return self.pages[-1]

    def give_back(self, page: Page) -> None:
        last = self.pages[-1]
        if last is not page:
            page.data.copy_(last.data)
            last.place, self.pages[page.place] = page.place, last
        self.pages.pop()
        if len(self.pages) <= (len(self.segments) - 1) * self.segment_pages:
            self.segments.pop()


@dataclass(eq=False)
class Page:
    """`page` tokens that nobody changes any more. holders: prompts and sequences that begin with it."""

    pool: Pool
    place: int
    holders: int = 1

    @property
    def data(self) -> Tensor:
        """[layers, 2, heads, page, head_dim]. Looked up anew after a page was given back: the last takes its place."""
        segment, place = divmod(self.place, self.pool.segment_pages)
        return self.pool.segments[segment][:, :, place]


class KVCache:
    """tails [layers, 2, slots, heads, page, head_dim]: what running sequences, the first slots, write in. page: tokens
    of a page."""

    def __init__(
        self, layers: int, slots: int, heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.page = slots, PAGE
        # zeros, as masked places are read too: they must hold numbers
        self.tails = torch.zeros(layers, 2, slots, heads, PAGE, head_dim, dtype=dtype, device=device)
        self.layers = [tuple(layer) for layer in self.tails]  # keys, values
        self.pools: dict[int, Pool] = {}

    def take(self, readers: int = 1) -> Page:
        """A page that up to so many running sequences will begin with.

        Pages of a kind are read together, for as many sequences each as the one with most of them has.
        """
        kind = 1 << (readers - 1).bit_length()
        if kind not in self.pools:
            self.pools[kind] = Pool(self.tails[:, :, 0], max(1, self.slots // kind))
        return self.pools[kind].take()

    def hold(self, pages: Iterable[Page]) -> list[Page]:
        """One holder more."""
        held = list(pages)
        for page in held:
            page.holders += 1
        return held

    def release(self, pages: Iterable[Page]) -> None:
        """One holder less; a page without any is free."""
        for page in pages:
            page.holders -= 1
            if not page.holders:
                page.pool.give_back(page)

    def full_tail(self, slot: int) -> Page:
        """The tail of a slot as a page; the slot begins an empty one."""
        page = self.take()
        page.data.copy_(self.tails[:, :, slot])
        return page

    def begin(self, slot: int, tail: Tensor) -> None:
        """The slot's tail becomes a copy of this one, [layers, 2, heads, page, head_dim]."""
        self.tails[:, :, slot] = tail

    def move(self, source: int, target: int) -> None:
        """The tail of slot `target` becomes that of `source`."""
        self.tails[:, :, target] = self.tails[:, :, source]
