"""Channels between processes: 1 MB trajectories beside bare ray.put and ray.get, and small messages in batches.

Eight producers and two consumers are ranks in processes of one node. The floor does the same transfers with Ray alone:
every producer puts its arrays, then every consumer gets its half of them by references it was handed; it has no queue,
no order and no back-pressure. Floor and channel take turns, so that a busy machine slows both. Every transfer is
checked for completeness. Not covered: several nodes, where the network decides.

    python benchmarks/channel_ray.py [--items 25] [--messages 20000] [--batch 64] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import ray
from _common import machine, new_parser, write_json

from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import ChannelClosed
from rl_platform.placement.scheduler import Host
from rl_platform.runtime import ComponentSpec
from rl_platform.runtime.ray.cluster_start import ray_cluster
from rl_platform.runtime.ray.runtime import RayRuntime

PRODUCERS, CONSUMERS, CAPACITY = 8, 2, 64
SHARE_TARGET, RATE_TARGET = 0.7, 20_000

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Placed:
    """Producers four to a process, each consumer in its own."""

    hosts = (
        Host("producers-0", 0, (), tuple(("producer", rank) for rank in range(4)), {}),
        Host("producers-1", 0, (), tuple(("producer", rank) for rank in range(4, 8)), {}),
        Host("consumer-0", 0, (), (("consumer", 0),), {}),
        Host("consumer-1", 0, (), (("consumer", 1),), {}),
    )

    def world_size(self, component: str) -> int:
        return {"producer": PRODUCERS, "consumer": CONSUMERS}[component]


class Producer:
    def __init__(self, context: Any) -> None:
        self.array = np.full(2**20, context.rank, np.uint8)

    def put(self, channel: Any, items: int) -> None:
        for _ in range(items):
            channel.put(self.array)

    def put_small(self, channel: Any, messages: int, batch: int) -> None:
        for start in range(0, messages, batch):
            channel.put_many(range(start, min(messages, start + batch)))


class Consumer:
    def __init__(self, context: Any) -> None:
        pass

    def get(self, channel: Any) -> tuple[int, int]:
        count = total = 0
        try:
            while True:
                for array in channel.get_many(8):
                    count, total = count + 1, total + int(array[0])
        except ChannelClosed:
            return count, total

    def get_small(self, channel: Any, messages: int, batch: int) -> bool:
        received: list[int] = []
        while len(received) < messages:
            received += channel.get_many(batch)
        return received == list(range(messages))


def through_channel(runtime: RayRuntime, groups: Any, items: int) -> None:
    channel = runtime.channel("trajectories", CAPACITY, ["producer"], ["consumer"])
    getting = groups["consumer"].get(channel)
    groups["producer"].put(channel, items).wait()
    channel.close()
    check(getting.wait(), items)


class Bare:
    """Puts or gets with Ray alone, in as many threads as the channel's users have."""

    def put(self, rank: int, items: int) -> list[Any]:
        array = np.full(2**20, rank, np.uint8)
        return [ray.put(array) for _ in range(items)]

    def get(self, references: list[Any]) -> tuple[int, int]:
        arrays = [ray.get(reference) for reference in references]
        return len(arrays), sum(int(array[0]) for array in arrays)


def bare(producers: list[Any], consumers: list[Any], items: int) -> None:
    putting = [producers[rank * len(producers) // PRODUCERS].put.remote(rank, items) for rank in range(PRODUCERS)]
    references = [reference for some in ray.get(putting) for reference in some]
    getting = [consumer.get.remote(references[rank::CONSUMERS]) for rank, consumer in enumerate(consumers)]
    check(ray.get(getting), items)


def check(found: list[tuple[int, int]], items: int) -> None:
    if tuple(map(sum, zip(*found, strict=True))) != (PRODUCERS * items, items * sum(range(PRODUCERS))):
        raise SystemExit("items were lost or repeated: the timings mean nothing")


def small(runtime: RayRuntime, groups: Any, messages: int, batch: int) -> None:
    channel = runtime.channel("small", 16 * batch, ["producer[0]"], ["consumer[0]"])
    getting = groups["consumer"].rank(0).get_small(channel, messages, batch)
    groups["producer"].rank(0).put_small(channel, messages, batch).wait()
    if not getting.wait()[0]:
        raise SystemExit("messages were lost, repeated or reordered: the timings mean nothing")
    channel.close()


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--items", type=int, default=25, help="of each producer")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    about = machine(["ray"])
    found: dict[str, list[float]] = {"channel MB/s": [], "bare MB/s": [], "small messages/s": []}
    with ray_cluster(Cluster(component_placement={}), processes=len(Placed.hosts)):  # tries again on a crowded machine
        producers = [ray.remote(Bare).options(num_cpus=0, max_concurrency=4).remote() for _ in range(2)]
        consumers = [ray.remote(Bare).options(num_cpus=0).remote() for _ in range(CONSUMERS)]
        with RayRuntime(Placed(), 120.0, 1) as runtime:
            groups = runtime.start({"producer": ComponentSpec(Producer), "consumer": ComponentSpec(Consumer)})
            megabytes = PRODUCERS * options.items
            for number in range(options.rounds + 1):  # the first one warms up
                rates = {
                    "channel MB/s": megabytes / seconds(lambda: through_channel(runtime, groups, options.items)),
                    "bare MB/s": megabytes / seconds(lambda: bare(producers, consumers, options.items)),
                    "small messages/s": options.messages
                    / seconds(lambda: small(runtime, groups, options.messages, options.batch)),
                }
                if number:
                    for name, rate in rates.items():
                        found[name].append(rate)
    print("median (lowest - highest)")
    for name, values in found.items():
        print(f"{name:<18} {statistics.median(values):>10,.0f} ({min(values):,.0f} - {max(values):,.0f})")
    share = statistics.median(a / b for a, b in zip(found["channel MB/s"], found["bare MB/s"], strict=True))
    print(f"share of bare Ray: {share:.2f} (target {SHARE_TARGET}): {'met' if share >= SHARE_TARGET else 'missed'}")
    rate = statistics.median(found["small messages/s"])
    print(f"small messages: target {RATE_TARGET:,}/s: {'met' if rate >= RATE_TARGET else 'missed'}")
    write_json(options.json, {"options": vars(options), "machine": about, "rates": found})


if __name__ == "__main__":
    main()
