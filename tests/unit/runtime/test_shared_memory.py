"""Memory of one process that others read: what is in use stays as it is, and nobody keeps it longer than that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from weight_readers import read_shared_memory

from rl_platform.runtime.weights.memory import MAPPED_BLOCKS, BlockAddress, MemoryReader, MemoryWriter, node_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared by Linux's memfd")
SIZE = 10_000


def written(writer: MemoryWriter, value: int, size: int = SIZE) -> BlockAddress:
    with writer.block(size) as block:
        block.memory[:] = value
    return block.place


@pytest.fixture
def another() -> Iterator[tuple[Callable[[BlockAddress | None], tuple[str, list[int]]], int]]:
    """A process that reads: how to ask it, and its id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_shared_memory, args=(theirs,), daemon=True)
    process.start()

    def ask(place: BlockAddress | None) -> tuple[str, list[int]]:
        ours.send(place)
        assert ours.poll(60), "it answers"
        return ours.recv()

    assert process.pid is not None
    yield ask, process.pid
    process.kill()
    process.join()


def test_another_process_reads_it_where_it_is_and_keeps_it_as_it_was(another) -> None:
    ask, _ = another
    writer = MemoryWriter()
    first = written(writer, 1)
    assert ask(first) == (node_name(), [1])
    places = [written(writer, value) for value in (2, 3, 4)]
    assert ask(None)[1] == [1], "it has not let go of it"
    assert first not in places
    assert ask(places[-1])[1] == [4]
    later = [written(writer, value) for value in (5, 6)]
    assert first in later, "its memory serves again"


def test_two_blocks_are_enough_for_who_takes_one_after_the_other() -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    seen = set()
    for value in range(10):
        place = written(writer, value)
        seen.add(place)
        memory = reader.read(place)
        assert (memory == value).all()
    assert len(seen) == 2


def test_what_was_written_last_is_not_written_over_before_anybody_had_a_chance_to_read_it() -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    place = written(writer, 1)
    written(writer, 2)
    assert (reader.read(place) == 1).all()


def test_a_killed_process_lets_go(another) -> None:
    ask, pid = another
    writer = MemoryWriter()
    first = written(writer, 1)
    ask(first)
    assert first not in [written(writer, value) for value in (2, 3, 4)]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert first in [written(writer, value) for value in (5, 6, 7)]


def test_who_writes_to_what_it_read_changes_its_own_copy() -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    place = written(writer, 1)
    mine, other = reader.read(place), MemoryReader().read(place)
    mine[:5000] = 9
    assert (other == 1).all()
    assert (mine[5000:] == 1).all()


@pytest.mark.parametrize("holder", [lambda memory: memory[10:20], torch.from_numpy, lambda m: torch.from_numpy(m)[1:]])
def test_a_part_of_it_holds_it_all(holder: Callable[[np.ndarray], object]) -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    place = written(writer, 1)
    part = holder(reader.read(place))
    assert place not in [written(writer, value) for value in (2, 3, 4)]
    del part
    assert place in [written(writer, value) for value in (5, 6)]


def test_blocks_of_another_size_go_when_nobody_reads_them() -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    small = [written(writer, 1, 100) for _ in range(2)]
    held = reader.read(small[1])
    written(writer, 2)
    written(writer, 3)
    with pytest.raises(FileNotFoundError):
        reader.read(small[0])
    assert (held == 1).all()
    assert (MemoryReader().read(small[1]) == 1).all(), "it is there as long as it is in use"


def test_a_reader_keeps_no_more_mapped_than_the_last_ones() -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    for size in range(100, 110):
        assert (reader.read(written(writer, size, size)) == size).all()
    assert len(reader._mapped) == MAPPED_BLOCKS
    other = MemoryWriter()
    reader.read(written(other, 7))
    assert len(reader._mapped) == MAPPED_BLOCKS + 1, "those of another writer are not counted"


def test_nothing_is_taken_for_something_else() -> None:
    writer, other = MemoryWriter(), MemoryWriter()
    place, others = written(writer, 1), written(other, 2)
    for wrong in (
        replace(place, path=others.path),  # a descriptor that was used again
        replace(place, path=f"/proc/{os.getpid()}/fd/99999"),
        replace(place, path="/proc/999999999/fd/3"),
    ):
        with pytest.raises(FileNotFoundError):
            MemoryReader().read(wrong)


def test_what_is_being_written_cannot_be_read() -> None:
    writer, reader = MemoryWriter(), MemoryReader()
    for _ in range(2):
        written(writer, 1)
    with writer.block(SIZE) as block, pytest.raises(BlockingIOError):
        reader.read(block.place)
    assert (reader.read(block.place) == 1).all()


def test_no_bytes_are_a_block_too() -> None:
    writer = MemoryWriter()
    assert MemoryReader().read(written(writer, 0, 0)).size == 0


def test_threads_read_side_by_side() -> None:
    writers, reader = [MemoryWriter() for _ in range(4)], MemoryReader()

    def work(writer: MemoryWriter) -> bool:
        return all((reader.read(written(writer, value, 100 + value)) == value).all() for value in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, writers))
