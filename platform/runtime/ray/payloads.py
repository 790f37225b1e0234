"""Items of a channel on their way to another process: small ones inside the call, large ones through the object store.

All large items of one call are stored as one object, as an object costs more than a megabyte in it. Only references go
through the queue, and every process of a node reads the same memory. Received items must therefore not be written to. A
stored item that is still referenced holds the memory of its whole bundle.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_platform.runtime.ray.serialization import IN_BAND, SHARED, Packed, References, pack, unpack

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport

BUNDLE = 8 * 2**20  # bytes: an object that holds as much takes no more items


@dataclass(frozen=True, slots=True)
class StoredItem:
    """The place of an item: the object's reference and the item's number in it."""

    reference: object
    index: int


@dataclass(frozen=True, slots=True)
class ItemBatch:
    """Small items, pickled as one list: a third of the work."""

    data: bytes


Content = bytes | Packed | StoredItem | ItemBatch


@dataclass(frozen=True, slots=True)
class Payload:
    """An item on its way to another process: pickled (bytes or Packed), or a reference to where that is stored. A
    receiver may also get several items as one `ItemBatch`."""

    content: Content


def to_payload(item: object, references: References) -> Payload:
    """Raises pickle's error for an item that cannot be serialised."""
    packed = pack(item, references)
    data = packed.data
    return Payload(data if isinstance(data, bytes) and not packed.buffers and packed.size < IN_BAND else packed)


def batch_contents(items: Sequence[object], references: References) -> list[Content]:
    """Returns the forms of items that one receiver takes. Raises pickle's error for one that cannot be serialised."""
    first = next((to_payload(item, references) for item in items if not isinstance(item, Payload)), None)
    if first is not None and isinstance(first.content, bytes) and not any(isinstance(item, Payload) for item in items):
        packed = pack(list(items), references)  # the others are probably as small as the first
        if isinstance(packed.data, bytes) and not packed.buffers:
            return [ItemBatch(packed.data)]
    return [(item if isinstance(item, Payload) else to_payload(item, references)).content for item in items]


def store_large(contents: Sequence[Content], store: RayTransport) -> list[Content]:
    """Returns the same forms, with the large ones in the object store if they are worth it together."""
    large = {index: content for index, content in enumerate(contents) if isinstance(content, Packed)}
    if sum(content.size for content in large.values()) < SHARED:
        return [_sendable(content) for content in contents]
    sent, last = list(contents), max(large)
    bundle, size = list[int](), 0
    for index, content in large.items():
        bundle.append(index)
        size += content.size
        if size >= BUNDLE or index == last:
            reference = store.store([_sendable(contents[member]) for member in bundle])
            for number, member in enumerate(bundle):
                sent[member] = StoredItem(reference, number)
            bundle, size = [], 0
    return sent


def unpack_items(items: Sequence[object], references: References, store: RayTransport) -> list[object]:
    """Returns the items themselves: payloads are unpacked, each stored object is read once, other items pass."""
    contents = [item.content if isinstance(item, Payload) else None for item in items]
    needed = list(dict.fromkeys(content.reference for content in contents if isinstance(content, StoredItem)))
    objects = dict(zip(needed, store.load(needed), strict=True)) if needed else {}

    def items_of(content: Content) -> list[object]:
        if isinstance(content, ItemBatch):
            return list(unpack(Packed(content.data, ()), references, copy=False))
        sent: bytes | Packed
        sent = objects[content.reference][content.index] if isinstance(content, StoredItem) else content
        return [unpack(Packed(sent, ()) if isinstance(sent, bytes) else sent, references, copy=False)]

    unpacked = [[item] if content is None else items_of(content) for item, content in zip(items, contents, strict=True)]
    return [item for part in unpacked for item in part]


def _sendable(content: Content) -> Content:
    """Returns the content with large parts as views, which are sent without a copy."""
    if not isinstance(content, Packed):
        return content
    data = content.data if memoryview(content.data).nbytes < IN_BAND else pickle.PickleBuffer(content.data)
    return Packed(data, [pickle.PickleBuffer(buffer) for buffer in content.buffers])
