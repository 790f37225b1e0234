"""Messages per second through a local channel, next to queue.SimpleQueue and collections.deque in the same run.

Every transfer is checked for order and completeness. `one thread` puts and gets in turns (the cost of a call); `two
threads` has a producer and a consumer (with hand-over and, for the channel, back-pressure). The deque has no waiting of
its own, so it runs in one thread only: it is the floor. Not covered: large payloads, which cost the same, as references
travel.

    python benchmarks/channel.py [--messages 200000] [--batch 64] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from _common import machine, new_parser, write_json

from rl_platform.runtime.channel import Channel

TARGET = 200_000  # small messages per second with batching
CAPACITY = 1024
Case = Callable[[int, int], list[int]]  # number of messages, size of a batch -> what was received


def new_channel() -> Channel[int]:
    return Channel("benchmark", CAPACITY, deadline_s=60)


def two_threads(produce: Callable[[], None], consume: Callable[[], list[int]]) -> list[int]:
    producer = threading.Thread(target=produce)
    producer.start()
    received = consume()
    producer.join()
    return received


def deque_one_thread(messages: int, batch: int) -> list[int]:
    line: deque[int] = deque()
    received = []
    for item in range(messages):
        line.append(item)
        received.append(line.popleft())
    return received


def one_thread(new_line: Callable[[], queue.SimpleQueue[int] | Channel[int]]) -> Case:
    def case(messages: int, batch: int) -> list[int]:
        line = new_line()
        received = []
        for item in range(messages):
            line.put(item)
            received.append(line.get())
        return received

    return case


def channel_batched_one_thread(messages: int, batch: int) -> list[int]:
    channel = new_channel()
    received: list[int] = []
    for start in range(0, messages, batch):
        channel.put_many(range(start, min(messages, start + batch)))
        received += channel.get_many(batch)
    return received


def simple_queue_two_threads(messages: int, batch: int) -> list[int]:
    line: queue.SimpleQueue[int] = queue.SimpleQueue()

    def produce() -> None:
        for item in range(messages):
            line.put(item)

    return two_threads(produce, lambda: [line.get() for _ in range(messages)])


def channel_two_threads(messages: int, batch: int) -> list[int]:
    channel = new_channel()

    def produce() -> None:
        for item in range(messages):
            channel.put(item)
        channel.close()

    return two_threads(produce, lambda: list(channel))


def channel_batched_two_threads(messages: int, batch: int) -> list[int]:
    channel = new_channel()

    def produce() -> None:
        for start in range(0, messages, batch):
            channel.put_many(range(start, min(messages, start + batch)))

    def consume() -> list[int]:
        received: list[int] = []
        while len(received) < messages:
            received += channel.get_many(batch)
        return received

    return two_threads(produce, consume)


CASES: dict[str, Case] = {
    "deque, one thread": deque_one_thread,
    "SimpleQueue, one thread": one_thread(queue.SimpleQueue),
    "channel, one thread": one_thread(new_channel),
    "channel batched, one thread": channel_batched_one_thread,
    "SimpleQueue, two threads": simple_queue_two_threads,
    "channel, two threads": channel_two_threads,
    "channel batched, two threads": channel_batched_two_threads,
}


def measure(messages: int, batch: int, rounds: int) -> dict[str, list[float]]:
    """Messages per second of every case and round; the cases take turns, so that a busy machine slows all alike."""
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, case in CASES.items():
            start = time.perf_counter()
            received = case(messages, batch)
            rates[name].append(messages / (time.perf_counter() - start))
            if received != list(range(messages)):
                raise SystemExit("messages were lost, repeated or reordered: the timings mean nothing")
    return rates


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    found = machine(())
    rates = measure(options.messages, options.batch, options.rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{'messages/s, median (lowest - highest)':<62}  of deque  of SimpleQueue")
    for name, values in rates.items():
        queue_rate = medians[f"SimpleQueue, {name.split(', ')[1]}"]
        spread = f"{medians[name]:>12,.0f} ({min(values):,.0f} - {max(values):,.0f})"
        shares = f"{medians[name] / medians['deque, one thread']:8.2f}  {medians[name] / queue_rate:14.2f}"
        print(f"{name:<28} {spread:<33}  {shares}")
    reached = medians["channel batched, two threads"]
    print(f"target: {TARGET:,} messages/s batched between two threads: {'met' if reached >= TARGET else 'missed'}")
    write_json(options.json, {"options": vars(options), "machine": found, "messages_per_s": rates})


if __name__ == "__main__":
    main()
