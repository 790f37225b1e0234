"""Weights on their way to another process: buckets, what travels with delta, and that all of it arrives as it was."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
from stand_ins import ObjectStore, Placed
from waiting import until

from rl_platform.components.actor import LanguageActor
from rl_platform.config.schema import Config
from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.host import ComponentContext
from rl_platform.runtime.ray import weight_store
from rl_platform.runtime.ray.publications import Publications
from rl_platform.runtime.ray.weight_store import BUCKET, publish, publish_gathered, receive
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import WeightGroup, WeightReceiver, WeightsOffer
from rl_platform.runtime.weights.weight_transfer import ROW, _sums, checksum, checksum_of, empty
from rl_platform.runtime.weights_token import WeightsToken, merge_published

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOKEN = WeightsToken("host0", "actor[0]", 1, 3, delta=True)
TINY = {"hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 64, "max_positions": 64}
SMALL = 2048  # bytes of a bucket, beside which the tiny model is large
MEDIUM = 2**20  # bytes of a bucket that Ray stores as an object, unlike a small one


def model() -> dict[str, torch.Tensor]:
    """Four buckets and a bit: one tensor over three of them, small ones, tied ones, an empty one, several types."""
    head = torch.randn(BUCKET // 4 * 3)
    return {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "head": head.view(3, -1),
        "none": torch.empty(0, 4),
        "half": torch.randn(5, 7).to(torch.bfloat16),
        "turned": torch.randn(6, 8).T,
        "tied": head.view(3, -1),
        "body": torch.randn(BUCKET // 4),
    }


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


def of_sums(tensor: torch.Tensor) -> bytes:
    """The checksum of a tensor on a GPU, which is computed in the same way on a CPU."""
    return checksum_of(_sums(tensor))


class TestChecksums:
    @pytest.mark.parametrize("of", [checksum, of_sums])
    @pytest.mark.parametrize("count", [0, 1, 7, ROW // 4, 3 * ROW + 5])
    def test_equal_bytes_have_equal_ones(self, of: Callable[[torch.Tensor], bytes], count: int) -> None:
        tensor = torch.randn(count + 1)[1:]
        for typed in (tensor, tensor.to(torch.bfloat16)):
            assert of(typed) == of(typed.clone())

    @pytest.mark.parametrize("of", [checksum, of_sums])
    @pytest.mark.parametrize("place", [0, 1, 5000, -1])
    def test_a_changed_bit_and_two_rows_or_columns_in_other_order_are_seen(
        self, of: Callable[[torch.Tensor], bytes], place: int
    ) -> None:
        tensor = torch.randint(256, (3 * ROW + 5,), dtype=torch.uint8)
        changed, turned = tensor.clone(), tensor.clone()
        changed[place] ^= 4
        turned[:ROW], turned[ROW : 2 * ROW] = tensor[ROW : 2 * ROW], tensor[:ROW]
        assert len({of(tensor), of(changed), of(turned), of(tensor.flip(0))}) == 4


class TestBuckets:
    def test_all_of_a_state_arrives_in_buckets_of_bounded_size(self) -> None:
        state, store = model(), ObjectStore()
        manifest = publish(state, store, None)
        received = receive(TOKEN, manifest, store, None)
        assert_equal(received.state, state)
        assert received.state["tied"].data_ptr() == received.state["head"].data_ptr()
        sizes = [sum(map(len, buffers)) for buffers in store.objects]
        assert max(sizes) == BUCKET
        assert (received.bytes, received.buckets) == (sum(sizes), len(sizes)) == (received.bytes, 5)
        assert received.bytes == sum(tensor.nbytes for name, tensor in state.items() if name != "tied")
        assert received.version == 3

    def test_an_update_of_one_tensor_moves_its_buckets_only(self) -> None:
        state, store = model(), ObjectStore()
        first = publish(state, store, None)
        own = receive(TOKEN, first, store, None).state
        state["body"] += 1
        second = publish(state, store, first)
        assert len(store.objects) == 5 + 2, "what did not change was stored again"
        received = receive(TOKEN, second, store, own)
        assert (received.buckets, received.bytes < 2 * BUCKET) == (2, True)
        assert_equal(received.state, state)
        assert received.state["body"].data_ptr() == own["body"].data_ptr()
        assert receive(TOKEN, second, store, received.state).bytes == 0

    def test_who_missed_a_version_wrote_to_its_tensors_or_is_new_gets_what_it_lacks(self) -> None:
        state, store = model(), ObjectStore()
        manifests = [publish(state, store, None)]
        own = receive(TOKEN, manifests[0], store, None).state
        for name in ("body", "half"):
            state[name] += 1
            manifests.append(publish(state, store, manifests[-1]))
        own["head"][0, 0] = 7.0
        missed = receive(TOKEN, manifests[-1], store, own)
        assert_equal(missed.state, state)
        assert 2 <= missed.buckets < 5
        assert receive(TOKEN, manifests[-1], store, None).buckets == 5

    def test_another_model_is_sent_whole(self) -> None:
        state, store = model(), ObjectStore()
        first = publish(state, store, None)
        own = receive(TOKEN, first, store, None).state
        other = {name: tensor for name, tensor in state.items() if name != "none"}
        received = receive(TOKEN, publish(other, store, first), store, own)
        assert_equal(received.state, other)
        assert received.buckets == 5

    def test_tensors_that_are_there_one_after_the_other_make_the_same_publication(self) -> None:
        state, store = model(), ObjectStore()
        together = publish(state, store, None)
        alive: list[weakref.ref[torch.Tensor]] = []

        def gathered() -> Iterator[tuple[list[str], torch.Tensor]]:
            for name, tensor in state.items():
                if name != "tied":
                    made = tensor.clone()
                    assert sum(one() is not None for one in alive) <= 4, "the small ones of a bucket"
                    assert sum(living.nbytes for one in alive if (living := one()) is not None) <= 4 * BUCKET
                    alive.append(weakref.ref(made))
                    yield ["head", "tied"] if name == "head" else [name], made
                    del made

        apart = publish_gathered(gathered(), store, together)
        assert apart.buckets == together.buckets, "the same bytes are not stored again"
        received = receive(TOKEN, apart, store, None).state
        assert_equal({name: received[name] for name in state}, state)
        assert received["tied"].data_ptr() == received["head"].data_ptr()

    def test_a_flipped_bit_is_found(self) -> None:
        state, store = model(), ObjectStore()
        manifest = publish(state, store, None)
        damaged = bytearray(store.objects[2][0])
        damaged[1000] ^= 1
        store.objects[2][0] = bytes(damaged)
        with pytest.raises(WorkerError, match=r"weights version 3 of actor\[0\] arrived damaged"):
            receive(TOKEN, manifest, store, None)


class TestGathered:
    """What a process keeps of weights that the ranks of a learner put together."""

    @pytest.mark.parametrize("receives", [False, True])
    @pytest.mark.parametrize("offered", [False, True])
    @pytest.mark.parametrize("stores", [False, True])
    def test_who_keeps_them(self, stores: bool, offered: bool, receives: bool) -> None:
        state, store, gone = model(), ObjectStore(), []

        def gathered() -> Iterator[tuple[list[str], torch.Tensor]]:
            for name, tensor in state.items():
                yield [name], tensor
            gone.append(True)

        here = Publications("host0", store, receives)
        token = here.publish(Weights(3, {}, offered=offered, gathered=gathered, stores=stores))
        assert gone, "all ranks go through all of them"
        keeps = receives or (offered and stores)
        assert token.held == (token.at("host0") is not None) == keeps
        assert (token.tensors is not None) == (offered and keeps)
        assert bool(store.objects) == (stores and not keeps)
        assert (here.store.stored(token) is not None) == (stores and not keeps)
        if keeps:
            assert_equal(here.published(token).state, state)
        elif stores:
            manifest = here.store.stored(token)
            assert_equal(receive(token, manifest, store, None).state, state)
            later = here.publish(Weights(4, {}, gathered=gathered))
            assert here.store.stored(token) is None, "replaced"
            assert here.store.stored(later) is not None

    @pytest.mark.parametrize("receives", [False, True])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("delta", [False, True])
    @pytest.mark.parametrize("readable", [3, 5])
    def test_older_ones_stay_readable(self, receives: bool, shared: bool, delta: bool, readable: int) -> None:
        """And are not exported between two calls of the rank, which may work for long."""
        store, states, tokens = ObjectStore(), [], []
        here = Publications("host0", store, receives)
        for version in range(readable + 2):
            state = {name: torch.full((8,), float(version if name == "a" else 0)) for name in "ab"}
            states.append(state)
            whole = (([name], tensor) for name, tensor in state.items())
            gathered = (lambda whole=whole: whole) if shared else None
            content = {} if shared else state
            tokens.append(here.publish(Weights(version, content, delta, gathered=gathered, readable=readable)))
        for version, token in enumerate(tokens):
            assert token.held == receives
            if receives:
                if version < 2:
                    with pytest.raises(WorkerError, match=f"version {version} of .* were replaced"):
                        here.published(token)
                else:
                    assert_equal(here.published(token).state, states[version])
            elif version < 2:
                assert here.store.stored(token) is None
            else:
                manifest = here.export(token, "store", None, lambda *_: pytest.fail("waits for the rank"))
                assert_equal(receive(token, manifest, store, None).state, states[version])


def config(training: str, tensor: int = 1, pipeline: int = 1, dtype: str = "float32", **rollout: Any) -> Config:
    return Config(
        runner={"task_type": "reasoning", "seed": 5},
        cluster={"component_placement": {"actor,rollout,reward": "all"}},
        data={"max_prompt_length": 6, "max_response_length": 12},
        algorithm={"adv_type": "grpo", "group_size": 2},
        rollout=rollout,
        actor={
            "model": {"random_init": TINY, "tokenizer": "bytes", "dtype": dtype},
            "training_backend": training,
            "parallel": {"tensor": tensor, "pipeline": pipeline},
        },
    )


class Frozen:
    """Publishes a state of several buckets of which `learn` changes some tensors; keeps what it receives."""

    def __init__(self, context: ComponentContext, delta: bool = False) -> None:
        weight_store.BUCKET = MEDIUM
        generator = torch.Generator().manual_seed(3)
        self.delta, self.version = delta, 0
        self.state = {name: torch.randn(MEDIUM // 4, generator=generator) for name in ("base", "frozen", "adapter")}
        self.received: dict[str, torch.Tensor] = {}

    def learn(self, *names: str) -> Weights:
        self.version += 1
        for name in names:
            self.state[name] += 1
        return Weights(self.version, self.state, self.delta)

    def receive(self, weights: Weights) -> tuple[int, int]:
        self.received = weights.state
        return weights.bytes, weights.buckets

    def sums(self) -> list[float]:
        state = self.received or self.state
        return [float(tensor.double().sum()) for tensor in state.values()]


class Whole:
    """Hands out what it received."""

    def __init__(self, context: ComponentContext) -> None:
        pass

    def receive(self, weights: Weights) -> dict[str, torch.Tensor]:
        return weights.state


class Joins:
    """Receives by a process group, or `fetched`: through the object store."""

    def __init__(self, context: ComponentContext, fetched: bool) -> None:
        self._receiver, self._fetched = WeightReceiver(context.label, torch.device("cpu")), fetched

    def receive(self, weights: WeightsOffer) -> dict[str, torch.Tensor]:
        if self._fetched:
            return weights.fetch().state
        own = empty(weights.tensors)
        self._receiver.receive(weights, own)
        return own


@pytest.fixture
def start(ray_cluster: None) -> Iterator[Callable[..., Any]]:
    from rl_platform.runtime.ray.runtime import RayRuntime

    started: list[Any] = []

    def run(specs: dict[str, ComponentSpec], *hosts: list[tuple[str, int]]) -> Any:
        runtime = RayRuntime(Placed.of(*hosts), 60.0, 5)
        started.append(runtime)
        return runtime.start(specs)

    yield run
    for runtime in started:
        runtime.shutdown()


def test_with_delta_fewer_bytes_give_the_same_weights_in_every_process(start) -> None:
    moved: dict[bool, list[list[tuple[int, int]]]] = {False: [], True: []}
    for delta, received in moved.items():
        spec = ComponentSpec(Frozen, {"delta": delta})
        groups = start({"actor": spec, "rollout": spec}, [("actor", 0)], [("rollout", 0)], [("rollout", 1)])
        for learned in ("base", "adapter"), ("adapter",), ():
            received.append(groups["rollout"].receive(groups["actor"].learn(*learned).wait()[0]).wait())
            assert groups["rollout"].sums().wait() == groups["actor"].sums().wait() * 2
        groups["rollout"].rank(0).receive(groups["actor"].learn("frozen").wait()[0]).wait()  # the other one misses it
        received.append(groups["rollout"].receive(groups["actor"].learn("adapter").wait()[0]).wait())
        assert groups["rollout"].sums().wait() == groups["actor"].sums().wait() * 2
    assert [[size for size, _ in ranks] for ranks in moved[False]] == [[3 * MEDIUM] * 2] * 4
    assert moved[True] == [[(3 * MEDIUM, 3)] * 2, [(MEDIUM, 1)] * 2, [(0, 0)] * 2, [(MEDIUM, 1), (2 * MEDIUM, 2)]]


class Watched(LanguageActor):
    """Knows how many bytes of the tensors of all its publications were alive in its process at a time, at most."""

    most = 0

    def publish(self, version: int, copy: bool = False, on_request: bool = False) -> Weights:
        weight_store.BUCKET = weight_group.BUCKET = SMALL
        self.made: list[weakref.ref[torch.Tensor]] = getattr(self, "made", [])
        return super().publish(version, copy, on_request)

    def _gathered(self, dtype: torch.dtype) -> Iterator[tuple[Sequence[str], torch.Tensor]]:
        for names, tensor in super()._gathered(dtype):
            self.made.append(weakref.ref(tensor))
            alive = [living for one in self.made if (living := one()) is not None]
            self.most = max(self.most, sum(living.nbytes for living in alive))
            del alive
            yield names, tensor

    def beside(self) -> int:
        return self.most


@pytest.mark.parametrize("layout", [("fsdp", 1, 1), ("megatron", 2, 1), ("megatron", 1, 2)], ids=str)
def test_sharded_weights_arrive_whole(start, layout: tuple[str, int, int]) -> None:
    components = {
        "actor": ComponentSpec(Watched, {"config": config(*layout)}),
        "rollout": ComponentSpec(Whole),
    }
    groups = start(components, [("actor", 0)], [("actor", 1)], [("rollout", 0)])
    published = merge_published(groups["actor"].publish(1).wait())
    (received,) = groups["rollout"].receive(published).wait()
    context = ComponentContext(name="actor", rank=0, world_size=1, accelerators=(), seed=5)
    expected = LanguageActor(context, config("fsdp")).publish(1).state
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in expected.values()}.values()
    room = SMALL + 2 * max(sizes)
    assert sum(sizes) > 2 * room, "a copy of the whole model would be seen"
    assert max(groups["actor"].beside().wait()) <= room


def test_a_rank_beside_a_rollout_keeps_the_weights_for_it(start) -> None:
    components = {"actor": ComponentSpec(Watched, {"config": config("fsdp")}), "rollout": ComponentSpec(Whole)}
    groups = start(components, [("actor", 0)], [("actor", 1), ("rollout", 0)], [("rollout", 1)])
    held = []
    for version in (1, 2):
        published = merge_published(groups["actor"].publish(version).wait())
        held.append(groups["actor"].beside().wait())
        beside, apart = groups["rollout"].receive(published).wait()
        assert beside.keys() == apart.keys()
        assert all(torch.equal(beside[name], tensor) for name, tensor in apart.items())
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in apart.values()}.values()
    passing, keeping = held[1]
    assert passing <= SMALL + 2 * max(sizes)
    assert sum(sizes) <= keeping <= sum(sizes) + 2 * max(sizes), "one publication, and what is on the way into it"


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (("fsdp", 1, 1), {}),
        (("fsdp", 1, 1), {"dtype": "bfloat16", "backend": "sglang"}),
        (("megatron", 1, 2), {"dtype": "bfloat16", "backend": "sglang"}),
    ],
    ids=str,
)
def test_the_sender_to_a_process_group_holds_one_publication_in_the_type_of_the_engine(
    start, layout: tuple[str, int, int], options: dict[str, str]
) -> None:
    component = ComponentSpec(Watched, {"config": config(*layout, weight_transfer="group", **options)})
    groups = start({"actor": component}, [("actor", 0)], [("actor", 1)])
    published = [merge_published(groups["actor"].publish(version).wait()) for version in (1, 2, 3)][-1]
    assert isinstance(published, WeightsToken)
    assert published.tensors is not None
    sizes = [tensor.nbytes for tensor in published.tensors if tensor.same_as is None]
    assert {str(tensor.dtype) for tensor in published.tensors} == {f"torch.{options.get('dtype', 'float32')}"}
    keeping, passing = groups["actor"].beside().wait()
    assert sum(sizes) <= keeping <= sum(sizes) + 2 * max(sizes)
    assert passing <= 2 * max(sizes)
    assert sum(sizes) > 4 * max(sizes), "a second publication would be seen"


@pytest.mark.parametrize(
    ("layout", "fetched"),
    [(("fsdp", 1, 1), False), (("megatron", 1, 2), True)],  # what sends does not depend on what gathers
    ids=["fsdp by a group", "megatron by the store"],
)
def test_weights_that_are_gathered_on_request_are_sent_while_later_ones_are_gathered(
    start, layout: tuple[str, int, int], fetched: bool
) -> None:
    """No rank of the learner holds more than two buckets and two tensors; a receiver may request them again."""
    components = {
        "actor": ComponentSpec(Watched, {"config": config(*layout, weight_transfer="group")}),
        "rollout": ComponentSpec(Joins, {"fetched": fetched}),
    }
    groups = start(components, [("actor", 0)], [("actor", 1)], [("rollout", 0)], [("rollout", 1)])
    context = ComponentContext(name="actor", rank=0, world_size=1, accelerators=(), seed=5)
    expected = LanguageActor(context, config("fsdp")).publish(1).state
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in expected.values()}.values()
    for version in (1, 2):
        published = merge_published(groups["actor"].publish(version, on_request=True).wait())
        assert isinstance(published, WeightsToken)
        (again,) = groups["rollout"].on([0]).receive(published).wait()
        both = groups["rollout"].receive(replace(published, receivers=2)).wait()
        for received in (again, *both):
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    most = 2 * SMALL + 2 * max(sizes)
    assert sum(sizes) > 2 * most, "a copy of the whole model would be seen"
    assert max(groups["actor"].beside().wait()) <= most


def test_the_other_ranks_gather_to_the_end_when_a_receiver_fails() -> None:
    gathered, helped = [], []

    def parts() -> Iterator[tuple[list[str], torch.Tensor]]:
        for name in "abc":
            gathered.append(name)
            yield [name], torch.ones(4)

    def fails(token: WeightsToken, values: Iterator[torch.Tensor], request: Any) -> None:
        next(values)
        raise WorkerError("the receiver is gone")

    here = Publications("host0", ObjectStore())
    token = here.publish(Weights(1, {}, offered=True, gathered=parts, on_request=True))
    assert "".join(gathered) == "abc", "the shapes"
    here._group.send, here._ask = fails, lambda *_: helped.append(True)  # type: ignore[method-assign]
    token = merge_published([token, replace(token, host="host1", label="actor[1]")])

    def at_once(_: str, function: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(function())
        except WorkerError as error:
            future.set_exception(error)
        return future

    request = WeightGroup("name", "127.0.0.1", 0, 2, "gloo", (("rollout[0]", 1),), True, SMALL)
    with pytest.raises(WorkerError, match="the receiver is gone"):
        here.export(token, "group", request, at_once)
    assert "".join(gathered) == "abcabc"
    until(lambda: bool(helped))
    here.export(token, "gather", replace(request, number=1), at_once)
    assert "".join(gathered) == "abcabcabc"


def test_gathered_weights_overwrite_those_of_before_unless_somebody_reads_them() -> None:
    def gathered() -> Iterator[tuple[list[str], torch.Tensor]]:
        for name in ("head", "body"):
            yield [name, f"{name} again"], torch.full((4,), float(version))

    for receives, overwrites, same in ((True, True, True), (True, False, False), (False, False, True)):
        here, places = Publications("host0", ObjectStore(), receives), []
        for version in (1, 2):
            weights = Weights(version, {}, offered=True, gathered=gathered, overwrites=overwrites)
            state = here.published(here.publish(weights)).state
            assert all(torch.equal(tensor, torch.full((4,), float(version))) for tensor in state.values())
            assert state["head"] is state["head again"]
            places.append(state)
        assert (places[0]["body"] is places[1]["body"]) == same
        if not same:
            assert places[0]["body"][0] == 1.0


def test_memory_that_was_swapped_out_is_not_written_to() -> None:
    here, state = Publications("host0", ObjectStore(), receives=True), {"head": torch.ones(4)}
    weights = Weights(1, {}, gathered=lambda: iter([(["head"], state["head"].clone())]), overwrites=True)
    first = here.published(here.publish(weights)).state["head"]
    first.untyped_storage().resize_(0)
    assert torch.equal(here.published(here.publish(weights)).state["head"], state["head"])
