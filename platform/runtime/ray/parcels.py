"""Items of a channel on their way to another process: small ones inside the call, large ones through the object store.

All large items of one call are stored as one object, as an object costs more than a megabyte in it. Only references
go through the queue, and every process of a node reads the same memory: received items must not be written to, and
one that is kept keeps the memory of those it was stored with.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_platform.runtime.ray.wire import IN_BAND, SHARED, Packed, References, pack, unpack

BUNDLE = 8 * 2**20  # bytes: an object that holds as much takes no more items


class Store(Protocol):
    """Memory that all processes can read."""

    def store(self, value: Any) -> Any:
        """Puts a message there; the reference to send instead."""

    def load(self, references: Sequence[Any]) -> list[Any]:
        """The messages, in shared memory where possible. Raises WorkerDied if one is lost."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an item lies: the object's reference and the item's number in it."""

    reference: Any
    index: int


@dataclass(frozen=True, slots=True)
class Several:
    """Small items, pickled as one list: a third of the work."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Parcel:
    """An item as it travels. `form`: pickled (bytes or Packed), or where that is stored. For a receiver: or several."""

    form: bytes | Packed | Stored | Several


def parcel(item: Any, references: References) -> Parcel:
    """Raises what pickling raises for an item that cannot travel."""
    packed = pack(item, references)
    return Parcel(packed if packed.buffers or packed.size >= IN_BAND else packed.data)


def together(items: Sequence[Any], references: References) -> list[Any]:
    """The forms of items that one receiver takes. Raises what pickling raises for one that cannot travel."""
    first = next((parcel(item, references) for item in items if not isinstance(item, Parcel)), None)
    if first is not None and isinstance(first.form, bytes) and not any(isinstance(item, Parcel) for item in items):
        packed = pack(list(items), references)  # the others are probably as small as the first
        if not packed.buffers:
            return [Several(packed.data)]
    return [(item if isinstance(item, Parcel) else parcel(item, references)).form for item in items]


def stored(forms: Sequence[Any], store: Store) -> list[Any]:
    """The same forms, with the large ones in the object store if they are worth it together."""
    large = [index for index, form in enumerate(forms) if isinstance(form, Packed)]
    if sum(forms[index].size for index in large) < SHARED:
        return [_sendable(form) for form in forms]
    found, bundle, size = list(forms), [], 0
    for index in large:
        bundle.append(index)
        size += forms[index].size
        if size >= BUNDLE or index == large[-1]:
            reference = store.store([_sendable(forms[member]) for member in bundle])
            for number, member in enumerate(bundle):
                found[member] = Stored(reference, number)
            bundle, size = [], 0
    return found


def opened(items: Sequence[Any], references: References, store: Store) -> list[Any]:
    """The items themselves: parcels are unpacked, each stored object is read once, other items pass."""
    forms = [item.form if isinstance(item, Parcel) else None for item in items]
    needed = list(dict.fromkeys(form.reference for form in forms if isinstance(form, Stored)))
    objects = dict(zip(needed, store.load(needed), strict=True)) if needed else {}

    def items_of(form: bytes | Packed | Stored | Several) -> list[Any]:
        if isinstance(form, Several):
            return list(unpack(Packed(form.data, ()), references, copy=False))
        if isinstance(form, Stored):
            form = objects[form.reference][form.index]
        return [unpack(Packed(form, ()) if isinstance(form, bytes) else form, references, copy=False)]

    found = [[item] if form is None else items_of(form) for item, form in zip(items, forms, strict=True)]
    return [item for part in found for item in part]


def _sendable(form: Any) -> Any:
    """Large parts are passed on from where they are, uncopied."""
    if not isinstance(form, Packed):
        return form
    data = form.data if len(form.data) < IN_BAND else pickle.PickleBuffer(form.data)
    return Packed(data, [pickle.PickleBuffer(buffer) for buffer in form.buffers])
