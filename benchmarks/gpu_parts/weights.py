"""Transfers of weights: to the generator, to another process, to host memory and back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from _language import batch, gpu_shape, network, training_engine

from gpu_parts.part import Report, Setup, at_most, fast
from rl_platform.engines.rollout.sglang.shared_weights import DEVICE
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.engines.training.base import MicroBatches
from rl_platform.models.language import LanguageModel
from rl_platform.records import Weights

LINK = fast(0.8)
ROUNDS = 3


def size_of(state: dict[str, torch.Tensor]) -> int:
    """Returns the bytes of the tensors; shared ones count once."""
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in state.values()}.values())


def learner_state(setup: Setup) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns the config of a model of 1.5 B parameters, and its float32 weights on the device."""
    plain = network(gpu_shape(setup.small), setup.device)
    return plain.config, LanguageModel(plain).state_dict()


def sync(setup: Setup, report: Report) -> None:
    """Reports the time in which the torch engine of the same process receives the weights, in float32 and bfloat16."""
    config, state = learner_state(setup)
    for dtype in (torch.float32, torch.bfloat16):
        engine = TorchRolloutEngine(config, (), 4, setup.device, dtype)
        version = iter(range(1000))

        def receive(engine: TorchRolloutEngine = engine, version: Any = version) -> None:
            engine.receive(Weights(next(version), state))

        receive()
        name = f"{size_of(state) / 1e9:.2f} GB of float32 to an engine in {str(dtype).removeprefix('torch.')}"
        report(name, 1e3 * setup.seconds(receive), "ms")
        if dtype == torch.float32:
            own = engine.model.state_dict(keep_vars=True)
            copied = sum(own[key].data_ptr() != tensor.data_ptr() for key, tensor in state.items())
            report("tensors copied, though type and device are the same", copied, "", at_most(0))


class _Handles(pickle.Unpickler):
    """Reads handles as SGLang's patched torch does: a GPU has its UUID in place of its number."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name != "rebuild_cuda_tensor":
            return found
        numbers = {
            str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())
        }
        return lambda *sent: found(*sent[:DEVICE], numbers[sent[DEVICE]], *sent[DEVICE + 1 :])


def read_weights(connection: Connection) -> None:
    """Runs in the other process: copies the tensors behind received handles, and sends back their sum."""
    from rl_platform.engines.rollout.sglang.shared_weights import load

    class Model:
        own: dict[str, torch.Tensor] = {}  # noqa: RUF012

        def load_weights(self, named: Any) -> None:
            for name, tensor in named:
                if name in self.own:
                    self.own[name].copy_(tensor)
                else:
                    self.own[name] = tensor.clone()
            if any(tensor.is_cuda for tensor in self.own.values()):
                torch.cuda.synchronize()

    model = Model()
    while (handles := connection.recv()) is not None:
        load(model, _Handles(io.BytesIO(handles)).load())
        connection.send(float(sum(tensor.double().sum() for tensor in model.own.values())))


def ipc(setup: Setup, report: Report) -> None:
    """Reports the GB/s at which a process on the same GPU reads the trainer's tensors; on a CPU, from shared memory."""
    from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights

    _, state = learner_state(setup)
    context = get_context(setup.start)
    line, theirs = context.Pipe()
    process = context.Process(target=read_weights, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    shared, sums = SharedWeights(), []

    def send() -> None:
        (handles,) = shared.write(state, 1)
        line.send(handles)
        sums.append(line.recv())

    send()
    for tensor in {tensor.data_ptr(): tensor for tensor in state.values()}.values():
        tensor.add_(0.5)
    seconds = setup.seconds(send)
    line.send(None)
    process.join(30)
    expected = float(sum(tensor.double().sum() for tensor in state.values()))
    report.rate(f"{size_of(state) / 1e9:.2f} GB", size_of(state) / 1e9, seconds, "GB/s")
    report("difference between the sums of what was sent and read", abs(sums[-1] / expected - 1), "", at_most(1e-9))


def by_ray(setup: Setup, report: Report) -> None:
    """Reports the GB/s at which weights are published to Ray's object store and read by another process."""
    import ray
    from weights import RayStore, Receiver, total

    from rl_platform.config.schema.cluster import Cluster
    from rl_platform.runtime.ray.cluster_start import ray_cluster
    from rl_platform.runtime.ray.weight_store import publish

    _, state = learner_state(setup)
    size = size_of(state)
    with ray_cluster(Cluster(component_placement={}), processes=2):  # it tries again on a crowded machine
        receiver = ray.remote(Receiver).options(num_cpus=0).remote()
        seconds = setup.seconds(lambda: ray.get(receiver.receive.remote(publish(state, RayStore(), None))), rounds=3)
        found = ray.get(receiver.total.remote())
    expected = total({name: tensor.cpu() for name, tensor in state.items()})
    report.rate(f"{size / 1e9:.2f} GB", size / 1e9, seconds, "GB/s")
    report("difference between the sums of what was sent and read", abs(found / expected - 1), "", at_most(1e-9))


def offload(setup: Setup, report: Report) -> None:
    """Reports the GB/s of a learner's weights and optimizer state to host memory and back, and those of the link."""
    from rl_platform.algorithms.losses import actor_loss
    from rl_platform.config.schema.algorithm import Algorithm
    from rl_platform.engines.offloading.offload import OffloadingEngine

    shape, device = gpu_shape(setup.small), setup.device
    trained = training_engine("fsdp", shape, dtype=torch.bfloat16, device=device, recompute=True, drawn_on=device)
    rows = batch((32, 32), shape["vocab_size"])
    trained.step(rows, lambda *given: actor_loss(*given, algorithm=Algorithm()), MicroBatches())
    engine = OffloadingEngine(trained, device)
    tensors = [*trained.offloadable()[0], *trained.offloadable()[1]]
    engine.onload(training=True)
    size = size_of({str(number): tensor for number, tensor in enumerate(tensors)})
    leave, enter = turns(setup, lambda: engine.offload(weights=True), lambda: engine.onload(training=True))
    there, here = link(setup)
    for name, seconds, limit in (("to host memory", leave, there), ("back", enter, here)):
        report.rate(f"{size / 1e9:.1f} GB {name}", size / 1e9, seconds, "GB/s")
        report(f"the link, {name}", limit / 1e9, "GB/s")
        report(f"{name}: share of the link", size / seconds / limit, "", LINK)


def turns(setup: Setup, leave: Callable[[], None], enter: Callable[[], None]) -> tuple[float, float]:
    """Returns the median seconds of both calls, which are made in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, found in zip((leave, enter), times, strict=True):
            found.append(setup.seconds(call, rounds=1, warm_up=0))
    return sorted(times[0])[ROUNDS // 2], sorted(times[1])[ROUNDS // 2]


def link(setup: Setup) -> tuple[float, float]:
    """Returns the bytes per second from the device to a pinned buffer, and back."""
    size = 2**20 if setup.small else 2**30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not setup.small)
    device = torch.empty(size, dtype=torch.uint8, device=setup.device)
    there = setup.seconds(lambda: host.copy_(device, non_blocking=True))
    return size / there, size / setup.seconds(lambda: device.copy_(host, non_blocking=True))
