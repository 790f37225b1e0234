"""Weights by a process group: a real one, of two processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from waiting import HANG_S, until
from weight_readers import read_from_group, receive_in_turn
from weight_senders import Learner, SendingProcess, forks

from rl_platform.errors import WorkerError
from rl_platform.runtime.ray import weight_sender
from rl_platform.runtime.ray.weight_sender import GroupTransfer, WeightSender
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import (
    Absence,
    JoinRequest,
    WeightGroup,
    WeightReceiver,
    WeightsOffer,
    buckets_of,
    distinct,
    offer_fields,
)
from rl_platform.runtime.weights_token import WeightsToken

pytestmark = pytest.mark.timeout(120, method="thread")  # who waits in a collective hears no signal
CPU = torch.device("cpu")
HEAD = torch.arange(12.0).view(3, 4)
STATE = {"head": HEAD, "half": torch.ones(5, dtype=torch.bfloat16), "turned": HEAD.T.clone().T, "tied": HEAD}


SMALL = 64  # bytes of a bucket
TENSORS = offer_fields(STATE, {})["tensors"]


@pytest.fixture
def opened() -> Iterator[WeightGroup]:
    """A group of one receiver, whose rendezvous lives as long as the test."""
    transfer = GroupTransfer(lambda: "127.0.0.1", pytest.fail)
    token = WeightsToken("host0", "actor[0]", 1, 1, delta=False, tensors=TENSORS)
    group = transfer.meet(token, JoinRequest("rollout[0]", 1, "cpu", checked=True))
    assert group is not None
    yield replace(group, bucket=SMALL)
    del transfer


@pytest.fixture
def other(opened: WeightGroup) -> Any:
    """The group, and the connection to the process that is its other rank."""
    context = forks()
    line, theirs = context.Pipe()
    process = context.Process(target=read_from_group, args=(opened, theirs))
    process.start()
    theirs.close()
    yield opened, line, process
    process.kill()
    process.join()


def test_every_tensor_arrives_once_and_in_order_in_buckets_of_one_type(other: Any) -> None:
    group, line, _ = other
    sender = WeightSender()
    buckets = [[tensor.name for tensor in bucket] for bucket in buckets_of(TENSORS, SMALL)]
    assert buckets == [["head"], ["half"], ["turned"]], "tied weights are sent once, and types are not mixed"
    assert [len(bucket) for bucket in buckets_of(TENSORS, 2**20)] == [1, 1, 1]
    for factor in (1, 2):  # the second time in the group that is there
        state = {name: tensor * factor for name, tensor in STATE.items()} | {"tied": None}
        line.send([48, 10, 48])
        sender.send(distinct(state, TENSORS), TENSORS, group)
        if factor == 1:
            assert line.recv() == "joined"
        sent = [state[name].contiguous().view(torch.uint8).numpy().tobytes() for name in ("head", "half", "turned")]
        assert line.recv() == sent


def test_tensors_are_converted_to_the_type_of_the_engine(other: Any) -> None:
    group, line, _ = other
    state = {"head": HEAD / 3, "bias": torch.ones(2)}
    tensors = offer_fields(state, {"head": torch.bfloat16})["tensors"]
    line.send([24, 8])
    WeightSender().send(distinct(state, tensors), tensors, group)
    line.recv()
    head, bias = line.recv()
    assert head == (HEAD / 3).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert bias == torch.ones(2).view(torch.uint8).numpy().tobytes()


def test_the_next_bucket_is_filled_while_one_is_on_its_way(other: Any) -> None:
    """The receiver reads the first one only after the sender has begun with the second."""
    group, line, _ = other
    sender = WeightSender()
    line.send([48, 10, 48])
    sender.send(distinct(STATE, TENSORS), TENSORS, group)
    first, _ = line.recv(), line.recv()
    assert first == "joined"
    large = {"head": torch.ones(2**22), "body": torch.arange(4.0)}  # more than the system keeps on the way

    def values() -> Iterator[torch.Tensor]:
        yield large["head"]
        line.send([2**24, 16])
        yield large["body"]

    sender.send(values(), offer_fields(large, {})["tensors"], group)
    assert [len(part) for part in line.recv()] == [2**24, 16]


def test_a_receiver_that_dies_is_told(other: Any) -> None:
    group, line, process = other
    sender = WeightSender()
    line.send([48, 10, 48])
    sender.send(distinct(STATE, TENSORS), TENSORS, group)
    process.kill()
    process.join()
    large = {"head": torch.zeros(2**22)}  # more than the system keeps on the way
    with pytest.raises(WorkerError, match=r"weights for rollout\[0\] could not be sent"):
        sender.send(large.values(), offer_fields(large, {})["tensors"], group)


def test_a_receiver_that_dies_while_the_next_bucket_is_filled_is_told(other: Any) -> None:
    group, line, process = other
    sender = WeightSender()
    line.send([48, 10, 48])
    sender.send(distinct(STATE, TENSORS), TENSORS, group)
    large = {"head": torch.zeros(2**22), "body": torch.zeros(4)}  # more than the system keeps on the way

    def values() -> Iterator[torch.Tensor]:
        yield large["head"]
        process.kill()
        process.join()
        yield large["body"]

    with pytest.raises(WorkerError, match=r"weights for rollout\[0\] could not be sent"):
        sender.send(values(), offer_fields(large, {})["tensors"], group)
    assert not sender.groups, "the next publication forms another one"


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
    assert learner.groups[0].name == learner.groups[1].name, "one group for all updates"


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
        offer = WeightsOffer(0, (), device, pytest.fail, pytest.fail, pytest.fail)
        assert all(offer.reaches(devices) for devices in reached)
        assert not any(offer.reaches(devices) for devices in unreached)


class Rollouts:
    """Processes that receive from one learner."""

    def __init__(self, learner: SendingProcess, count: int) -> None:
        context = forks()
        self.address, self.lines, self.processes = Learner(learner.address), [], []
        for rank in range(count):
            self.start(rank, context)

    def start(self, rank: int, context: Any) -> None:
        line, theirs = context.Pipe()
        process = context.Process(target=receive_in_turn, args=(self.address, f"rollout[{rank}]", theirs), daemon=True)
        process.start()
        theirs.close()
        self.lines[rank:] = [line, *self.lines[rank + 1 :]]
        self.processes[rank:] = [process, *self.processes[rank + 1 :]]

    def ask(self, state: Any, version: int, ranks: Any, dies: Any = None) -> None:
        for rank in ranks:
            self.lines[rank].send(pickle.dumps((state, version, len(ranks), (dies or {}).get(rank))))

    def found(self, rank: int) -> Any:
        return pickle.loads(self.lines[rank].recv_bytes())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("count", [2, 3])
def test_all_receivers_are_in_one_group_and_each_bucket_is_sent_once(count: int) -> None:
    learner = SendingProcess(bucket=SMALL)
    rollouts = Rollouts(learner, count)
    everybody = frozenset(f"rollout[{rank}]" for rank in range(count))
    for version in (1, 2):
        state = {name: tensor * version for name, tensor in STATE.items()}
        rollouts.ask(state, version, range(count))
        for rank in range(count):
            own, groups = rollouts.found(rank)
            assert_arrived(own, state)
            assert groups == [everybody] * version
    rollouts.close()
    learner.kill()


@pytest.mark.parametrize("arrived", [1, 3])
def test_a_receiver_that_is_killed_while_weights_are_sent_costs_the_others_no_weights(arrived: int) -> None:
    """The others request them again; with the successor of the killed one all are in one group again."""
    learner = SendingProcess(bucket=2**22)
    rollouts = Rollouts(learner, 3)
    state = {f"layer {number}": torch.full((2**20,), float(number)) for number in range(4)}
    rollouts.ask(state, 1, range(3))
    for rank in range(3):
        rollouts.found(rank)
    rollouts.ask(state, 2, range(3), dies={1: arrived})
    for rank in (0, 2):
        own, groups = rollouts.found(rank)
        assert_arrived(own, state)
        assert groups[-1] in ({f"rollout[{rank}]"}, groups[0]), "alone, unless all had arrived"
    with pytest.raises(EOFError):
        rollouts.found(1)
    rollouts.start(1, forks())
    rollouts.ask(state, 2, [1])
    assert_arrived(rollouts.found(1)[0], state)
    rollouts.ask(state, 3, range(3))
    for rank in range(3):
        own, groups = rollouts.found(rank)
        assert_arrived(own, state)
        assert len(groups[-1]) == 3
    rollouts.close()
    learner.kill()


def test_receivers_that_do_not_come_or_get_the_weights_otherwise_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transfer = GroupTransfer(lambda: "127.0.0.1", pytest.fail)
    token = WeightsToken("host0", "actor[0]", 1, 1, delta=False, tensors=TENSORS, receivers=3)
    assert transfer.meet(token, Absence()) is None
    with ThreadPoolExecutor() as threads:
        requests = [JoinRequest(f"rollout[{rank}]", ranks, "cpu", checked=False) for rank, ranks in ((0, 2), (2, 4))]
        both = [found.result() for found in [threads.submit(transfer.meet, token, one) for one in requests]]
    assert both[0] == both[1]
    assert both[0] is not None
    assert both[0].world_size == 7
    assert sorted(rank for _, rank in both[0].first_ranks) in ([1, 3], [1, 5])
    monkeypatch.setattr(weight_sender, "JOIN_S", 0.0)
    late = transfer.meet(replace(token, number=2), JoinRequest("rollout[0]", 1, "cpu", checked=False))
    assert late is not None
    assert late.receivers == {"rollout[0]"}


def test_a_receiver_that_was_started_again_counts_once() -> None:
    transfer = GroupTransfer(lambda: "127.0.0.1", pytest.fail)
    token = WeightsToken("host0", "actor[0]", 1, 1, delta=False, tensors=TENSORS, receivers=2)
    first, second = (JoinRequest(f"rollout[{rank}]", 1, "cpu", checked=False) for rank in (0, 1))
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(transfer.meet, token, first) for _ in range(2)]
        until(lambda: len(transfer._changed._waiters) == 2)
        group = threads.submit(transfer.meet, token, second).result()
        assert group is not None
        assert group.world_size == 3
        assert group.receivers == {"rollout[0]", "rollout[1]"}
        assert {found.result().name for found in asked if found.result() is not None} == {group.name}


def test_a_receiver_that_died_is_not_waited_for_until_it_is_started_again() -> None:
    transfer = GroupTransfer(lambda: "127.0.0.1", pytest.fail)
    token = WeightsToken("host0", "actor[0]", 1, 1, delta=False, tensors=TENSORS, receivers=2)
    first, second = (JoinRequest(f"rollout[{rank}]", 1, "cpu", checked=False) for rank in (0, 1))
    with ThreadPoolExecutor(4) as threads:
        asked = threads.submit(transfer.meet, token, first)
        until(lambda: len(transfer._changed._waiters) == 1)
        transfer.lost("reward[1]")  # receives no weights
        assert not asked.done()
        transfer.lost("rollout[1]")
        alone = asked.result(timeout=HANG_S)
        assert alone is not None
        assert alone.receivers == {"rollout[0]"}
        transfer.restarted()
        successor = threads.submit(transfer.meet, token, second).result(timeout=HANG_S)
        assert successor.receivers == {"rollout[1]"}, "the other one has these weights"
        later = replace(token, number=2)
        both = [threads.submit(transfer.meet, later, one) for one in (first, second)]
        assert [found.result(timeout=HANG_S).receivers for found in both] == [{"rollout[0]", "rollout[1]"}] * 2


def test_the_request_of_a_receiver_that_died_is_void() -> None:
    transfer = GroupTransfer(lambda: "127.0.0.1", pytest.fail)
    token = WeightsToken("host0", "actor[0]", 1, 1, delta=False, tensors=TENSORS, receivers=2)
    first, second = (JoinRequest(f"rollout[{rank}]", 1, "cpu", checked=False) for rank in (0, 1))
    with ThreadPoolExecutor(4) as threads:
        dead = threads.submit(transfer.meet, token, second)
        until(lambda: len(transfer._changed._waiters) == 1)
        transfer.lost("rollout[1]")
        transfer.restarted()
        both = [threads.submit(transfer.meet, token, one) for one in (first, second)]
        groups = [found.result(timeout=HANG_S) for found in (*both, dead)]
    assert groups[0] == groups[1] == groups[2]
    assert groups[0].receivers == {"rollout[0]", "rollout[1]"}
    assert groups[0].world_size == 3
