"""Seconds of new weights from a learner to several rollout engines in other processes, by process groups (gloo).

Two ways, in turns within one run: one group with all engines, and one group for each engine, served one after the
other. 64 float32 tensors of 8 MB; a learner that publishes bfloat16 sends half of the bytes. Only the
connections for requests are not the product's code. Received and sent tensors are compared. Not covered: NCCL, several
nodes.

    python benchmarks/weight_groups.py [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import pickle
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from _common import machine, new_parser, write_json

TENSORS, ELEMENTS = 64, 2 * 2**20
ENGINES = (1, 2, 3)
TOGETHER, APART = "one group", "a group for each"


class Learner:
    """Publishes weights and answers the requests of engines, as the process of a learner does."""

    def __init__(self) -> None:
        from rl_platform.runtime.ray.publications import Publications

        class Transport:
            def address(self) -> str:
                return "127.0.0.1"

        self._publications: Any = Publications("bench", Transport())  # type: ignore[arg-type]
        self._rank = ThreadPoolExecutor(1)
        self._listener = Listener(("127.0.0.1", 0), backlog=16)
        self.address = self._listener.address
        threading.Thread(target=self._serve, daemon=True).start()

    def publish(self, state: Any, version: int) -> Any:
        from rl_platform.records import Weights

        return self._publications.publish(Weights(version, state, offered=True))

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._answer, args=(self._listener.accept(),), daemon=True).start()

    def _answer(self, line: Connection) -> None:
        with line:
            token, request = pickle.loads(line.recv_bytes())
            line.send_bytes(pickle.dumps(self._publications.export(token, "group", request, self._in_turn)))

    def _in_turn(self, _: str, function: Callable[[], object]) -> Future[object]:
        return self._rank.submit(function)


def ask(address: Any, token: Any, request: Any) -> Any:
    with Client(address) as line:
        line.send_bytes(pickle.dumps((token, request)))
        return pickle.loads(line.recv_bytes())


def engine(address: Any, label: str, line: Connection) -> None:
    """Receives the publication of each token that comes into its own tensors; answers with a value of the last one."""
    import torch

    from rl_platform.runtime.weights.group import WeightReceiver, WeightsOffer
    from rl_platform.runtime.weights.weight_transfer import empty

    torch.set_num_threads(1)
    receivers = {way: WeightReceiver(f"{label} {way}", torch.device("cpu")) for way in (TOGETHER, APART)}
    own: dict[str, Any] = {}
    while (asked := line.recv()) is not None:
        way, token = asked
        own = own or empty(token.tensors)
        call = partial(ask, address, token)
        offer = WeightsOffer(token.version, token.tensors, "cpu", lambda: None, call, call)  # type: ignore[arg-type]
        receivers[way].receive(offer, own)
        line.send(float(own[token.tensors[-1].name][-1]))


def main() -> None:
    options = new_parser(__doc__, rounds=5).parse_args()
    import torch

    torch.set_num_threads(1)
    found, learner, context = machine(("torch",)), Learner(), get_context("spawn")
    state = {f"layer {number}": torch.zeros(ELEMENTS) for number in range(TENSORS)}
    size = TENSORS * ELEMENTS * 4
    lines: list[Connection] = []
    for number in range(max(ENGINES)):
        mine, theirs = context.Pipe()
        context.Process(target=engine, args=(learner.address, f"rollout[{number}]", theirs), daemon=True).start()
        theirs.close()
        lines.append(mine)
    seconds: dict[int, dict[str, list[float]]] = {count: {TOGETHER: [], APART: []} for count in ENGINES}
    version = 0
    for number in range(options.warm_up + options.rounds):
        for count, ways in seconds.items():
            for way, laps in ways.items():
                version += 1
                for tensor in state.values():
                    tensor.fill_(version)
                token = replace(learner.publish(state, version), receivers=count if way == TOGETHER else 1)
                began = time.perf_counter()
                for line in lines[:count]:
                    line.send((way, token))
                if any(line.recv() != version for line in lines[:count]):
                    raise SystemExit("what arrived is not what was sent: the timings mean nothing")
                if number >= options.warm_up:
                    laps.append(time.perf_counter() - began)
    for line in lines:
        line.send(None)
    print(f"{size / 1e6:.0f} MB")
    for count, ways in seconds.items():
        times = {way: statistics.median(laps) for way, laps in ways.items()}
        ratio = statistics.median(b / a for a, b in zip(ways[TOGETHER], ways[APART], strict=True))
        print(f"{count} engines: {', '.join(f'{way} {each:.2f} s' for way, each in times.items())}; ratio {ratio:.2f}")
    write_json(options.json, {"benchmark": "weight_groups", "machine": found, "bytes": size, "seconds": seconds})


if __name__ == "__main__":
    main()
