"""Tensors leave their device and come back: the memory is free in between, and no bit of what is learned changes.

On a CPU the device is main memory too: what is measured are the storages that parameters, gradients and optimizer
state stand on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from process_groups import end_process_groups
from torch import nn

from rl_platform.config.schema.models import Actor
from rl_platform.engines.offloading.offload import OffloadingEngine, onloaded
from rl_platform.engines.offloading.swap import Swap, pinned_sizes, storages
from rl_platform.engines.training.build import training_engine
from rl_platform.engines.training.state_files import read, write

CPU = torch.device("cpu")
kinds = pytest.mark.parametrize("kind", ["actor", "critic", "embodied"])


def held(engine: Any) -> tuple[int, int]:
    """Bytes on the device: of parameters, and of gradients and optimizer state."""
    weights, state, gradients = engine.offloadable()
    own = storages(weights, CPU)
    rest = {key: storage for key, storage in storages([*state, *gradients], CPU).items() if key not in own}
    return sum(storage.nbytes() for storage in own.values()), sum(storage.nbytes() for storage in rest.values())


class TestSwap:
    def test_views_and_shared_storages_come_back_as_they_were(self) -> None:
        whole = torch.randn(6, 4)
        views = [whole, whole[2], whole.T, whole[1:3]]
        expected = [view.clone() for view in views]
        swap = Swap(lambda: views, CPU)
        swap.leave()
        assert whole.untyped_storage().nbytes() == 0
        swap.leave()  # again: nothing
        swap.enter()
        swap.enter()
        assert all(torch.equal(*pair) for pair in zip(views, expected, strict=True))
        assert views[1].data_ptr() == whole[2].data_ptr()

    def test_what_changed_meanwhile_counts(self) -> None:
        tensor = torch.zeros(4)
        swap = Swap(lambda: [tensor], CPU)
        for value in (1.0, 2.0):
            tensor.fill_(value)
            swap.leave()
            swap.enter()
            assert tensor.tolist() == [value] * 4

    def test_constant_tensors_are_copied_once(self) -> None:
        tensor = torch.ones(4)
        swap = Swap(lambda: [tensor], CPU, constant=True)
        swap.leave()
        swap.enter()
        tensor.fill_(7)  # nobody does: this shows that the first copy is used
        swap.leave()
        swap.enter()
        assert tensor.tolist() == [1.0] * 4

    def test_values_that_are_not_needed_are_not_copied(self) -> None:
        needed, unneeded = torch.ones(4), torch.ones(1000)
        swap = Swap(lambda: [needed, needed], CPU, unneeded=lambda: [unneeded, needed[1:]])
        for _ in range(2):
            swap.leave()
            assert [copy.sizes for copy in swap._copies.values()] == [[16]]
            assert needed.untyped_storage().nbytes() == unneeded.untyped_storage().nbytes() == 0
            swap.enter()
            assert needed.tolist() == [1.0] * 4
            assert unneeded.untyped_storage().nbytes() == 4000

    @pytest.mark.parametrize("size", [1, 2**20 - 1, 2**20, 3 * 2**20 + 17, 2**27 - 3, 9 * 2**33 + 2**22])
    def test_pinned_buffers_waste_less_than_a_mebibyte(self, size: int) -> None:
        sizes = pinned_sizes(size)
        assert sum(sizes) == size
        rounded = sum(1 << (part - 1).bit_length() for part in sizes)  # as torch allocates them
        assert rounded - size < 2**20

    def test_large_tensors_come_back_from_several_buffers(self) -> None:
        tensor = torch.randn(7 * 2**17 + 3)
        expected, swap = tensor.clone(), Swap(lambda: [tensor], CPU)
        swap.leave()
        assert [len(copy.host) for copy in swap._copies.values()] == [3]
        swap.enter()
        assert torch.equal(tensor, expected)

    def test_a_gradient_goes_on_growing(self) -> None:
        def run(swap_between: bool) -> torch.Tensor:
            torch.manual_seed(1)
            model = nn.Linear(8, 8)
            swap = Swap(lambda: [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)], CPU)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for seed in range(4):
                numbers = torch.Generator().manual_seed(seed)
                model(torch.randn(5, 8, generator=numbers)).square().sum().backward()
                if swap_between:
                    swap.leave()
                    left = [tensor.untyped_storage() for p in model.parameters() for tensor in (p, p.grad)]
                    assert sum(storage.nbytes() for storage in left) == 0
                    swap.enter()
                if seed % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

        assert torch.equal(run(True), run(False))

    def test_parameters_on_memory_that_cannot_be_freed_get_their_own(self) -> None:
        message = bytearray(torch.arange(6.0).numpy().tobytes())
        parameter = nn.Parameter(torch.frombuffer(message, dtype=torch.float32), requires_grad=False)
        assert not parameter.untyped_storage().resizable()
        swap = Swap(lambda: [parameter], CPU)
        swap.leave()
        assert parameter.untyped_storage().nbytes() == 0
        swap.enter()
        assert parameter.tolist() == [0, 1, 2, 3, 4, 5]

    def test_tensors_of_other_devices_stay(self) -> None:
        away = torch.empty(3, device="meta")
        swap = Swap(lambda: [away], CPU)
        swap.leave()
        swap.enter()


def trained(ranks: ModuleType, kind: str, engine: Any, *, leave: bool) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """Metrics of three steps, outputs after them, and the state. `leave`: after every use, now and then in part."""
    reports = []
    for step in range(3):
        ranks.outputs(engine, kind)
        if leave:
            engine.offload(weights=step % 2 == 0)
        reports += ranks.steps(engine, kind, step, step + 1)
        if leave:
            engine.offload(weights=True)
            assert held(engine) == (0, 0)
    return reports, ranks.outputs(engine, kind), whole_state(engine)


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of what a checkpoint would hold, what is away included."""
    with onloaded(engine):
        return {
            f"{name} {offsets}": part.clone()
            for name, sharded in engine.sharded_state().items()
            for offsets, part in sharded.destinations
        }


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


@kinds
def test_training_away_and_back_is_training(ranks: ModuleType, kind: str) -> None:
    engine = OffloadingEngine(ranks.engine(kind), CPU)
    actual = trained(ranks, kind, engine, leave=True)
    plain = ranks.engine(kind)
    expected = trained(ranks, kind, plain, leave=False)
    moments = [tensor for name, tensor in expected[2].items() if ".exp_avg " in name and tensor.abs().max() > 0]
    assert len(moments) > 2
    for one, other in zip(actual, expected, strict=True):
        assert_equal(one, other)


@kinds
def test_it_is_there_only_while_it_is_used(ranks: ModuleType, kind: str) -> None:
    engine = OffloadingEngine(ranks.engine(kind), CPU)
    assert held(engine) == (0, 0)  # from the beginning
    ranks.outputs(engine, kind)
    weights, _ = held(engine)
    assert weights > 0
    ranks.steps(engine, kind, 0, 1)
    assert held(engine)[1] >= 2 * weights  # both moments
    engine.offload(weights=False)
    assert held(engine) == (weights, 0)
    ranks.outputs(engine, kind)
    assert held(engine) == (weights, 0), "an evaluation needs no optimizer"
    state = whole_state(engine)
    assert held(engine) == (weights, 0)
    engine.offload(weights=True)
    saved = {name.partition(" ")[0] for name in state if name.startswith("model.")}
    assert {f"model.{name}" for name in engine.weights()} >= saved
    assert held(engine) == (weights, 0)
    engine.offload(weights=True)
    whole_state(engine)
    assert held(engine) == (0, 0)


@kinds
def test_a_state_is_written_and_read_by_one_that_is_away(ranks: ModuleType, kind: str, tmp_path: Path) -> None:
    engine = OffloadingEngine(ranks.engine(kind), CPU)
    ranks.steps(engine, kind, 0, 2)
    engine.offload(weights=True)
    with onloaded(engine):
        write(engine.sharded_state(), tmp_path)
    assert held(engine) == (0, 0)
    undisturbed = ranks.steps(engine, kind, 2, 4)
    other = OffloadingEngine(ranks.engine(kind), CPU)
    with onloaded(other):
        read(other.sharded_state(), tmp_path)
    assert held(other) == (0, 0)
    assert ranks.steps(other, kind, 2, 4) == undisturbed


@pytest.mark.parametrize("offload", [True, False])
def test_the_key_decides(ranks: ModuleType, offload: bool) -> None:
    section = Actor(offload=offload, optim=ranks.OPTIM)
    engine = training_engine(section, ranks.model("actor"), dtype=torch.float32, horizon=32, device=CPU, nominal=False)
    assert isinstance(engine, OffloadingEngine) == offload


@pytest.fixture
def megatron(script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    pytest.importorskip("megatron.core")
    yield script(Path(__file__).with_name("megatron_ranks.py"))
    end_process_groups()


def test_megatron_leaves_with_its_buffers_and_masters(ranks: ModuleType, megatron: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        engine = OffloadingEngine(megatron.megatron("actor", dtype=dtype), CPU)
        actual = trained(ranks, "actor", engine, leave=True)
        expected = trained(ranks, "actor", megatron.megatron("actor", dtype=dtype), leave=False)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
