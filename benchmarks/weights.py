"""Seconds and bytes per second of new weights on their way to the rollout engine, next to copying them in memory.

SmolLM2-135M-Instruct, float32, 538 MB. Ways, in turns within one run:

* copy: every tensor into another of the same process, the measure of the others.
* one process: the torch engine takes the trainer's tensors by reference; that no byte of them was copied is checked.
  Its time is what packing the matrices costs on a CPU.
* engine's process: by shared memory into tensors of another process. The trainer's tensors are moved there before the
  measurement, as by the second update of a run.
* SGLang: the same, into SGLang's own model on a CPU, if its test set is installed.
* object store: publish, and receive in another process through Ray's object store; with checksums on both sides.
* gloo: the same buckets to another process by broadcasts of a process group, without checksums and with them.

What was received is compared by its sum. Not covered: GPUs, several nodes.

    python benchmarks/weights.py [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import multiprocessing
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
from _common import machine, new_parser, write_json
from _language import sglang_installed, sglang_on_cpu

MODEL = "smollm2-135m-instruct"
TARGET = 0.5
TIMEOUT_S = 120.0  # of the process group
ROOM = 4096  # tokens of keys and values, of which there are none
COPY, REFERENCE, SHARED, SGLANG = "copy", "one process", "engine's process", "SGLang"
STORE = "object store"
GLOO, CHECKED = "gloo", "gloo, checked"

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class RayStore:
    """The object store as the runtime uses it."""

    def store(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def load(self, references: Any) -> Any:
        import ray

        return ray.get(list(references))


class Receiver:
    """A process of Ray's that keeps what it received."""

    def __init__(self) -> None:
        self.state: Any = None

    def receive(self, manifest: Any) -> None:
        from rl_platform.runtime.ray.weight_store import receive

        self.state = receive(token(), manifest, RayStore(), self.state).state

    def total(self) -> float:
        return total(self.state)


def token() -> Any:
    from rl_platform.runtime.weights_token import WeightsToken

    return WeightsToken("bench", "actor", 0, 0, delta=False)


def total(state: Any) -> float:
    return float(sum(tensor.double().sum() for tensor in state.values()))


class Engine:
    """What a model does with weights it is to load, at the least: copies them into tensors of its own."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}

    def load_weights(self, named: Sequence[tuple[str, Any]]) -> None:
        for name, tensor in named:
            if name in self.own:
                self.own[name].copy_(tensor)
            else:
                self.own[name] = tensor.clone()


def engine_process(connection: Connection) -> None:
    """Loads what it is shown, with the product's loader."""
    from rl_platform.engines.rollout.sglang.shared_weights import load

    engine = Engine()
    serve(connection, lambda handles: load(engine, pickle.loads(handles)), lambda: engine.own)


def gloo_process(connection: Connection) -> None:
    """Rank 1 of a process group, which receives the buckets of `runtime/ray/weight_store.py` by gloo's broadcasts.

    First it is shown the port of the rendezvous and the tensors, then for each transport whether it has checksums.
    """
    import torch
    import torch.distributed as dist

    from rl_platform.runtime.ray.process_group import join_group, leave_group
    from rl_platform.runtime.ray.weight_store import BUCKET
    from rl_platform.runtime.weights.weight_transfer import checksum_of, empty

    port, tensors = connection.recv()
    join_group(("127.0.0.1", port), 1, 2, TIMEOUT_S, cuda=False)
    state = empty(tensors)
    packed, checksum = torch.empty(BUCKET, dtype=torch.uint8), torch.empty(16, dtype=torch.uint8)
    connection.send(None)

    def receive(checked: bool) -> None:
        for parts in buckets(state, tensors):
            dist.broadcast(packed[: sum(part.size for part in parts)], 0)
            start = 0
            for part in parts:
                torch.from_numpy(part).copy_(packed[start : start + part.size])
                start += part.size
            if checked:
                dist.broadcast(checksum, 0)
                if checksum_of(parts) != checksum.numpy().tobytes():
                    raise SystemExit("a bucket arrived damaged")

    serve(connection, receive, lambda: state)
    leave_group()


def buckets(state: Any, tensors: Any) -> Iterator[list[Any]]:
    """The bytes of distinct tensors, as `publish` cuts them."""
    from rl_platform.runtime.ray.weight_store import BUCKET, in_buckets
    from rl_platform.runtime.weights.weight_transfer import bytes_of

    flat = ((tensor.name, bytes_of(state[tensor.name])) for tensor in tensors if tensor.same_as is None)
    return (parts for _, parts in in_buckets(flat, BUCKET))


def by_gloo(state: dict[str, Any], group: Beside) -> Callable[[bool], None]:
    """Joins the group as rank 0. The function broadcasts all buckets, packed one by one, and waits until they are in
    the other process."""
    import torch
    import torch.distributed as dist

    from rl_platform.runtime.ray.process_group import Rendezvous, join_group
    from rl_platform.runtime.ray.weight_store import BUCKET
    from rl_platform.runtime.weights.weight_transfer import checksum_of, shapes_of

    meeting, tensors = Rendezvous("127.0.0.1", 2), shapes_of(state)
    group.ask((meeting.port, tensors), lambda: join_group(meeting, 0, 2, TIMEOUT_S, cuda=False))
    packed = torch.empty(BUCKET, dtype=torch.uint8)

    def broadcast(checked: bool) -> None:
        for parts in buckets(state, tensors):
            start = 0
            for part in parts:
                packed[start : start + part.size] = torch.from_numpy(part)
                start += part.size
            dist.broadcast(packed[:start], 0)
            if checked:
                dist.broadcast(torch.frombuffer(bytearray(checksum_of(parts)), dtype=torch.uint8), 0)

    return lambda checked: group.ask(checked, lambda: broadcast(checked))


def serve(connection: Connection, take: Callable[[Any], None], state: Callable[[], Any]) -> None:
    """Takes what comes; says the sum of the weights it has if that is nothing."""
    while True:
        try:
            shown = connection.recv()
        except EOFError:
            return
        if shown is not None:
            take(shown)
        connection.send(total(state()) if shown is None else None)


class Beside:
    """Another process, which serves with `run`."""

    def __init__(self, run: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, shown: Any, meanwhile: Callable[[], None] | None = None) -> Any:
        """The answer to `shown`; `meanwhile` runs here before the answer is awaited."""
        self._line.send(shown)
        if meanwhile is not None:
            meanwhile()
        return self._line.recv()

    def close(self) -> None:
        self._line.close()
        self._process.join()


def through_shared_memory(state: dict[str, Any], engine: Beside) -> Callable[[], None]:
    from rl_platform.engines.rollout.sglang.shared_weights import SharedWeights

    shared = SharedWeights()
    for _ in range(2):
        shared.write(state, 1)
    return lambda: engine.ask(*shared.write(state, 1))


def into_sglang(engine: Any, state: dict[str, Any]) -> Callable[[], None]:
    from rl_platform.records import Weights

    def load() -> None:
        engine.receive(Weights(engine.version + 1, state))

    for _ in range(2):
        load()
    return load


def by_reference(network: Any, state: dict[str, Any]) -> Callable[[], None]:
    import torch

    from rl_platform.engines.rollout.torch import TorchRolloutEngine
    from rl_platform.records import Weights

    engine = TorchRolloutEngine(network.config, (), 16, torch.device("cpu"))

    def take() -> None:
        engine.receive(Weights(engine.version + 1, state))
        own = engine.model.state_dict(keep_vars=True)
        if any(own[name].data_ptr() != tensor.data_ptr() for name, tensor in state.items()):
            raise SystemExit("the engine has tensors of its own")

    return take


def report(size: int, seconds: Mapping[str, Sequence[float]]) -> None:
    """`size`: bytes; seconds of every round, by way."""
    print(f"{size / 1e6:.0f} MB")
    for name, values in seconds.items():
        rate = "0 bytes copied" if name == REFERENCE else f"{size / statistics.median(values) / 1e9:6.2f} GB/s"
        share = statistics.median(a / b for a, b in zip(seconds[COPY], values, strict=True))
        aim = f" (aim {TARGET})" if name in (SHARED, SGLANG) else ""
        verdict = "" if name in (COPY, REFERENCE) else f"{share:.2f} of the copy's rate{aim}"
        print(f"{name:<18} {statistics.median(values):6.2f} s  {rate}  {verdict}")
    for name in (GLOO, CHECKED):
        faster = statistics.median(b / a for a, b in zip(seconds[STORE], seconds[name], strict=True))
        print(f"the object store beside {name}: {faster:.2f} times its speed")


def main() -> None:
    options = new_parser(__doc__, rounds=3).parse_args()
    import ray
    import torch
    from transformers import AutoModelForCausalLM

    from rl_platform.config.schema.cluster import Cluster
    from rl_platform.models.language import LanguageModel
    from rl_platform.models.pretrained.model_folder import model_folder
    from rl_platform.runtime.cpu import keep_freed_memory
    from rl_platform.runtime.ray.cluster_start import ray_cluster
    from rl_platform.runtime.ray.process_group import leave_group
    from rl_platform.runtime.ray.weight_store import publish

    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    found = machine(("torch", "ray"))
    network = AutoModelForCausalLM.from_pretrained(model_folder(MODEL), dtype=torch.float32).eval()
    state = LanguageModel(network).state_dict()
    distinct = {tensor.data_ptr(): tensor for tensor in state.values()}.values()
    size = sum(tensor.nbytes for tensor in distinct)
    copies = [torch.empty_like(tensor) for tensor in distinct]

    opened = ExitStack()
    opened.enter_context(ray_cluster(Cluster(component_placement={}), processes=2))  # tries again on a crowded machine
    receiver = ray.remote(Receiver).options(num_cpus=0).remote()
    engine, group = Beside(engine_process), Beside(gloo_process)
    broadcast = by_gloo(state, group)
    ways: dict[str, Callable[[], Any]] = {
        COPY: lambda: [own.copy_(tensor) for own, tensor in zip(copies, distinct, strict=True)],
        REFERENCE: by_reference(network, state),
        SHARED: through_shared_memory(state, engine),
        STORE: lambda: ray.get(receiver.receive.remote(publish(state, RayStore(), None))),
        GLOO: lambda: broadcast(False),
        CHECKED: lambda: broadcast(True),
    }
    if sglang_installed():
        ways[SGLANG] = into_sglang(opened.enter_context(sglang_on_cpu(network, 1, ROOM, options.threads)), state)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.warm_up + options.rounds):
        for tensor in distinct:
            tensor.add_(0.01)
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number >= options.warm_up:
                seconds[name].append(time.perf_counter() - began)
    arrived = {engine.ask(None), ray.get(receiver.total.remote()), group.ask(None)}
    if arrived != {total(state)}:
        raise SystemExit("what arrived is not what was sent: the timings mean nothing")
    opened.close()
    for process in (engine, group):
        process.close()
    leave_group()

    report(size, seconds)
    write_json(options.json, {"benchmark": "weights", "machine": found, "bytes": size, "seconds": seconds})


if __name__ == "__main__":
    main()
