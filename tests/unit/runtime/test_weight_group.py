"""Weights by a process group: a real one, of two processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from weight_readers import read_from_group
from weight_senders import SendingProcess

from rl_platform.errors import WorkerError
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import (
    WeightGroup,
    WeightReceiver,
    WeightSender,
    WeightsOffer,
    offer_fields,
    open_group,
)

pytestmark = pytest.mark.timeout(120, method="thread")  # who waits in a collective hears no signal
CPU = torch.device("cpu")
HEAD = torch.arange(12.0).view(3, 4)
STATE = {"head": HEAD, "half": torch.ones(5, dtype=torch.bfloat16), "turned": HEAD.T.clone().T, "tied": HEAD}


@pytest.fixture
def other() -> Any:
    """The group, and the connection to the process that is its other rank."""
    meeting, group = open_group("rollout[0]", "127.0.0.1", 2, CPU)
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=read_from_group, args=(group, theirs))
    process.start()
    theirs.close()
    yield group, line, process
    process.kill()
    process.join()
    del meeting


def test_every_tensor_arrives_once_and_in_order(other: Any) -> None:
    group, line, _ = other
    sender, tensors = WeightSender(), offer_fields(STATE)["tensors"]
    wanted = [(tensor.shape, tensor.dtype) for tensor in tensors if tensor.same_as is None]
    assert len(wanted) == 3, "tied weights are sent once"
    for factor in (1, 2):  # the second time in the group that is there
        state = {name: tensor * factor for name, tensor in STATE.items()} | {"tied": None}
        line.send(wanted)
        sender.send(state, tensors, group)
        if factor == 1:
            assert line.recv() == "joined"
        assert line.recv() == [state[name].float().tolist() for name in ("head", "half", "turned")]


def test_a_receiver_that_dies_is_told(other: Any) -> None:
    group, line, process = other
    sender, tensors = WeightSender(), offer_fields(STATE)["tensors"]
    line.send([(tensor.shape, tensor.dtype) for tensor in tensors if tensor.same_as is None])
    sender.send(STATE, tensors, group)
    process.kill()
    process.join()
    large = {"head": torch.zeros(2**22)}  # more than the system keeps on the way
    with pytest.raises(WorkerError, match=r"weights for rollout\[0\] could not be sent"):
        sender.send(large, offer_fields(large)["tensors"], group)


@pytest.fixture
def learner() -> Iterator[SendingProcess]:
    process = SendingProcess()
    yield process
    process.kill()


def room() -> dict[str, torch.Tensor]:
    """What an engine has for the weights, one of them in another type."""
    tensors = {name: torch.full_like(tensor, -1) for name, tensor in STATE.items()}
    return tensors | {"half": torch.full((5,), -1.0), "tied": tensors["head"]}


def assert_arrived(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        assert torch.equal(own[name], tensor.to(own[name].dtype)), name


def test_weights_are_written_over_those_of_before(learner: SendingProcess) -> None:
    receiver, own = WeightReceiver("rollout[0]", CPU), room()
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    for factor in (1, 2):
        state = {name: tensor * factor for name, tensor in STATE.items()}
        state["tied"] = state["head"]
        receiver.receive(learner.offer(state, factor), own)
        assert_arrived(own, state)
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == places
    assert own["half"].dtype == torch.float32
    assert learner.groups[0] == learner.groups[1], "one group for all updates"


def test_what_differs_from_its_checksum_is_no_version(learner: SendingProcess) -> None:
    offer = learner.offer(STATE, 7)

    def damaged(group: WeightGroup) -> list[bytes]:
        first, *others = offer.send(group)
        return [first, b"of other bytes", *others[1:]]

    receiver, own = WeightReceiver("rollout[0]", CPU), room()
    with pytest.raises(WorkerError, match="weights version 7 arrived damaged: the checksum of half differs"):
        receiver.receive(replace(offer, send=damaged), own)
    receiver.receive(offer, own)
    assert_arrived(own, STATE)


def test_after_a_sender_that_fails_or_dies_the_next_one_is_met_anew(learner: SendingProcess) -> None:
    receiver, own = WeightReceiver("rollout[0]", CPU), room()

    def refused(group: WeightGroup) -> list[bytes]:
        raise WorkerError("weights were replaced")

    with pytest.raises(WorkerError, match="were replaced"):  # the other side never came to the group
        receiver.receive(replace(learner.offer(STATE, 1), send=refused), own)
    receiver.receive(learner.offer(STATE, 2), own)
    with pytest.raises(WorkerError, match="were replaced"):  # it is there and sends nothing
        receiver.receive(replace(learner.offer(STATE, 3), send=refused), own)
    receiver.receive(learner.offer(STATE, 4), own)
    learner.kill()
    with pytest.raises((EOFError, OSError)):
        receiver.receive(learner.offer(STATE, 5), own)
    successor = SendingProcess()
    own = room()
    receiver.receive(successor.offer(STATE, 6), own)
    successor.kill()
    assert_arrived(own, STATE)


def test_weights_that_do_not_fit_are_refused_on_both_sides(learner: SendingProcess) -> None:
    receiver, own = WeightReceiver("rollout[0]", CPU), room() | {"half": torch.zeros(2, 2)}
    large = STATE | {"turned": torch.zeros(2**22)}  # more than the system keeps on the way
    with pytest.raises(WorkerError, match=r"weights for rollout\[0\] could not be sent"):
        receiver.receive(learner.offer(large, 1), own)


def test_a_group_is_of_cpus_or_of_distinct_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "place_of", str)
    gpus = [torch.device("cuda", number) for number in range(3)]
    for device, reached, unreached in (("cpu", [[CPU]], [gpus]), ("cuda:0", [gpus[1:]], [[CPU], gpus, gpus[:1]])):
        offer = WeightsOffer(0, (), device, "", fetch=lambda: pytest.fail("fetched"), send=lambda group: [])
        assert all(offer.reaches(devices) for devices in reached)
        assert not any(offer.reaches(devices) for devices in unreached)
