"""Weights in shared memory: what another process reads there, and how often they are copied."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_readers import read_shared_weights

from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights


@pytest.fixture(scope="module")
def line() -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=read_shared_weights, args=(theirs,))
    process.start()
    theirs.close()  # its end is seen then
    yield ours
    ours.send(None)
    process.join(60)


@pytest.fixture
def state() -> dict[str, Tensor]:
    """A learner's parameters, two of them tied."""
    made = {name: torch.nn.Parameter(torch.randn(10, 12)) for name in ("first", "second", "third")}
    return made | {"tied": made["first"]}


def received(line: Any, shared: SharedWeights, state: dict[str, Tensor]) -> int:
    """Writes; checks that another process reads the present weights. How many pieces of memory it has mapped then."""
    line.send(*shared.write({name: tensor.detach() for name, tensor in state.items()}, 1))
    tensors, mapped = line.recv()
    assert list(tensors) == list(state)
    assert all(torch.equal(torch.from_numpy(tensors[name]), tensor.detach()) for name, tensor in state.items())
    return int(mapped)


def test_a_learners_tensors_are_moved_there_and_copied_no_more(line: Any, state: dict[str, Tensor]) -> None:
    shared, optimizer = SharedWeights(), torch.optim.Adam(state.values())
    for number in range(4):
        for tensor in state.values():
            tensor.grad = torch.randn_like(tensor)
        optimizer.step()  # the parameters go on being the optimizer's
        mapped = received(line, shared, state)
        assert mapped == (3 if number > 0 else 1), "kept for the next update, and nothing older"
        assert [tensor.is_shared() for tensor in state.values()] == [number > 0] * 4
        assert bool(shared._views) == (number == 0), "no second copy in shared memory"
    assert state["first"].data_ptr() == state["tied"].data_ptr()


def test_tensors_that_do_not_last_are_copied_into_the_same_room(line: Any, state: dict[str, Tensor]) -> None:
    shared, kept = SharedWeights(), []
    for _ in range(3):
        fresh = {name: torch.randn_like(tensor) for name, tensor in state.items()}
        kept.append(fresh)  # none has the address of an earlier one
        assert received(line, shared, fresh) == 1
        assert not any(tensor.is_shared() for tensor in fresh.values())


def test_without_room_for_a_second_copy_they_stay_where_they_are(
    line: Any, state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedWeights()
    received(line, shared, state)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    received(line, shared, state)
    assert not any(tensor.is_shared() for tensor in state.values())
    assert shared.has_room(state)
