"""Items on their way to another process: which travel together, and that all of them arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl_platform.runtime.ray.payloads import (
    ItemBatch,
    Payload,
    StoredItem,
    batch_contents,
    store_large,
    to_payload,
    unpack_items,
)
from rl_platform.runtime.ray.serialization import IN_BAND, NO_REFERENCES, SHARED, Packed, pack, unpack


class Memory:
    """Messages by number, each pickled as on its way to another process."""

    def __init__(self) -> None:
        self.kept: list[Packed] = []

    def store(self, value: Any) -> int:
        self.kept.append(pack(value, NO_REFERENCES))
        return len(self.kept) - 1

    def load(self, references: Sequence[int]) -> list[Any]:
        return [unpack(self.kept[number], NO_REFERENCES, copy=True) for number in references]


def arrived(contents: Sequence[Any], memory: Memory) -> list[Any]:
    return unpack_items([Payload(content) for content in store_large(contents, memory)], NO_REFERENCES, memory)


def test_small_items_of_one_get_are_pickled_as_one():
    items = [{"number": number, "text": "equal in all"} for number in range(50)]
    (content,) = batch_contents(items, NO_REFERENCES)
    assert isinstance(content, ItemBatch)
    assert len(content.data) < 0.5 * sum(len(to_payload(item, NO_REFERENCES).content) for item in items)
    assert arrived([content], Memory()) == items


@pytest.mark.parametrize("large_first", [True, False])
def test_large_items_travel_apart_and_keep_the_order(large_first: bool):
    items: list[Any] = [np.full(SHARED, 7, np.uint8), "small"]
    items = items if large_first else [*items[::-1], "another"]
    memory = Memory()
    contents = batch_contents(items, NO_REFERENCES)
    assert [isinstance(content, Packed) for content in contents] == [isinstance(item, np.ndarray) for item in items]
    assert sum(isinstance(content, StoredItem) for content in store_large(contents, memory)) == 1
    received = arrived(contents, memory)
    assert [str(item) for item in received] == [str(item) for item in items]


def test_items_that_came_as_parcels_go_on_as_they_came():
    came = to_payload("from elsewhere", NO_REFERENCES)
    assert batch_contents([came, "from here"], NO_REFERENCES)[0] is came.content
    assert arrived(batch_contents([came, "from here"], NO_REFERENCES), Memory()) == ["from elsewhere", "from here"]


def test_nothing_travels_as_nothing_and_an_item_with_a_medium_buffer_arrives():
    assert batch_contents([], NO_REFERENCES) == []
    items = [np.arange(2 * IN_BAND, dtype=np.uint8), np.arange(3, dtype=np.uint8)]
    received = arrived(batch_contents(items, NO_REFERENCES), Memory())
    assert [item.tolist() for item in received] == [item.tolist() for item in items]
