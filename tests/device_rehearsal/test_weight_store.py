"""Weights of the pretended device on their way to Ray's object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from device_rehearsal.pretended_device import CUDA, Device
from stand_ins import ObjectStore
from torch import Tensor

from rl_platform.runtime.ray import weight_store
from rl_platform.runtime.ray.weight_store import StoreTransfer, publish, publish_gathered, receive
from rl_platform.runtime.weights_token import WeightsToken

BUCKET = 2048  # bytes


def gathered(state: Mapping[str, Tensor], store: Any, before: Any) -> Any:
    return publish_gathered((((name,), tensor) for name, tensor in state.items()), store, before)


@pytest.mark.parametrize("send", [publish, gathered])
def test_each_byte_is_copied_once_through_one_pinned_bucket(
    send: Callable[..., Any], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends one tensor of several buckets, small ones, one in main memory and one that is not contiguous."""
    monkeypatch.setattr(weight_store, "BUCKET", BUCKET)
    values = {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "host": torch.randn(130),
        "large": torch.randn(3, 700),
        "half": torch.randn(5, 7).to(torch.bfloat16),
        "turned": torch.randn(6, 80).T,
        "last": torch.randn(300),
    }
    state = {name: value if name == "host" else value.to(CUDA) for name, value in values.items()}
    device.counts.clear()
    store, token = ObjectStore(), WeightsToken("host0", "actor[0]", 1, 3, delta=True)
    manifest = send(state, store, None)
    slices = [piece for bucket in manifest.buckets for piece in bucket.pieces if piece.name != "host"]
    assert device.counts.copies.total() == len(slices) > len(values)
    assert device.pinned() == BUCKET
    found = receive(token, manifest, store, None).state  # type: ignore[arg-type]
    for name, value in values.items():
        assert torch.equal(found[name], value), name
    stored = len(store.objects)
    state["half"].add_(1)
    send(state, store, manifest)
    assert len(store.objects) == stored + 1, "other buckets are equal"


@pytest.mark.parametrize("delta", [False, True])
def test_every_publication_holds_at_most_two_gathered_tensors(
    delta: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU holds neither the whole model nor the former publication: while one tensor is sent, the next arrives."""
    monkeypatch.setattr(weight_store, "BUCKET", BUCKET)
    transfer, before, size = StoreTransfer(ObjectStore()), device.allocated(), 4 * 700  # type: ignore[arg-type]
    held: list[int] = []

    def gathered() -> Iterator[tuple[Sequence[str], Tensor]]:
        for index in range(12):
            tensor = torch.randn(700).to(CUDA)
            held.append(device.allocated() - before)
            yield (f"layer.{index}",), tensor

    for number in range(3):
        transfer.publish_gathered(WeightsToken("host0", "actor[0]", number, number, delta=delta), gathered())
        assert size <= max(held) <= 2 * size
        assert device.allocated() == before
