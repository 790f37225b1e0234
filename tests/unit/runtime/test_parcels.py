"""Items on their way to another process: which travel together, and that all of them arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rl_platform.runtime.ray.parcels import Parcel, Several, Stored, opened, parcel, stored, together
from rl_platform.runtime.ray.wire import IN_BAND, PLAIN, SHARED, Packed, pack, unpack


class Memory:
    """Messages by number, each pickled as on its way to another process."""

    def __init__(self) -> None:
        self.kept: list[Packed] = []

    def store(self, value: Any) -> int:
        self.kept.append(pack(value, PLAIN))
        return len(self.kept) - 1

    def load(self, references: Sequence[int]) -> list[Any]:
        return [unpack(self.kept[number], PLAIN, copy=True) for number in references]


def arrived(forms: Sequence[Any], memory: Memory) -> list[Any]:
    return opened([Parcel(form) for form in stored(forms, memory)], PLAIN, memory)


def test_small_items_of_one_get_are_pickled_as_one():
    items = [{"number": number, "text": "equal in all"} for number in range(50)]
    (form,) = together(items, PLAIN)
    assert isinstance(form, Several)
    assert len(form.data) < 0.5 * sum(len(parcel(item, PLAIN).form) for item in items)
    assert arrived([form], Memory()) == items


@pytest.mark.parametrize("large_first", [True, False])
def test_large_items_travel_apart_and_keep_the_order(large_first: bool):
    items: list[Any] = [np.full(SHARED, 7, np.uint8), "small"]
    items = items if large_first else [*items[::-1], "another"]
    memory = Memory()
    forms = together(items, PLAIN)
    assert [isinstance(form, Packed) for form in forms] == [isinstance(item, np.ndarray) for item in items]
    assert sum(isinstance(form, Stored) for form in stored(forms, memory)) == 1
    found = arrived(forms, memory)
    assert [str(item) for item in found] == [str(item) for item in items]


def test_items_that_came_as_parcels_go_on_as_they_came():
    came = parcel("from elsewhere", PLAIN)
    assert together([came, "from here"], PLAIN)[0] is came.form
    assert arrived(together([came, "from here"], PLAIN), Memory()) == ["from elsewhere", "from here"]


def test_nothing_travels_as_nothing_and_an_item_with_a_medium_buffer_arrives():
    assert together([], PLAIN) == []
    items = [np.arange(2 * IN_BAND, dtype=np.uint8), np.arange(3, dtype=np.uint8)]
    assert [found.tolist() for found in arrived(together(items, PLAIN), Memory())] == [item.tolist() for item in items]
