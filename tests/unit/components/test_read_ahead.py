"""Ranks of the reward share the responses of a stream by the time that they take."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_platform.components.read_ahead import AHEAD_S, MOST, ReadAhead
from rl_platform.records import Prompt, Trajectory
from rl_platform.runtime.channel import Channel

COUNT = 48
SLEEPS = """
import os, time

def score(response, answer, metadata):
    time.sleep(float(os.environ["SECONDS"]))
    return 1.0
"""


def responses(folder: Path) -> Channel[Trajectory]:
    source: Channel[Trajectory] = Channel("trajectories", COUNT, 60.0)
    source.put_many(
        [
            Trajectory(Prompt(n, "question", str(folder), (1,)), 0, (2,), (-0.1,), "stop", 3, text="a response")
            for n in range(COUNT)
        ]
    )
    source.close()
    return source


def scored_by_ranks(rewards, folder: Path) -> list[int]:
    sink: Channel[Trajectory] = Channel("scored", COUNT, 60.0)
    source = responses(folder)
    with ThreadPoolExecutor(len(rewards)) as ranks:
        counts = list(ranks.map(lambda reward: reward.stream(source, sink), rewards))
    assert len(sink.get_many(COUNT)) == COUNT
    return counts


@pytest.mark.parametrize("workers", [(1, 1, 1, 1), (1, 3)])
def test_slow_scores_are_shared_by_speed(language_reward, tmp_path, monkeypatch, workers: tuple[int, ...]) -> None:
    """The slowest rank decides when a rollout is complete."""
    monkeypatch.setenv("SECONDS", "0.05")
    rewards = [language_reward("mine", SLEEPS, type="mine:score", num_workers=each) for each in workers]
    counts = scored_by_ranks(rewards, tmp_path)
    shares = [COUNT * each / sum(workers) for each in workers]
    assert counts == [pytest.approx(share, abs=4) for share in shares]


def test_fast_scores_are_read_in_large_parts(language_reward, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SECONDS", "0")
    reward, source = language_reward("mine", SLEEPS, type="mine:score", num_workers=1), responses(tmp_path)
    reads: list[int] = []
    take = source.get_many

    def get_many(most: int) -> list[Trajectory]:
        reads.append(len(found := take(most)))
        time.sleep(0.005)  # of a message
        return found

    monkeypatch.setattr(source, "get_many", get_many)
    assert reward.stream(source, Channel("scored", COUNT, 60.0)) == COUNT
    assert reads[0] == 2
    assert max(reads) >= 8


def test_the_room_follows_what_was_finished() -> None:
    ahead = ReadAhead(at_once=3)
    assert ahead.room() == 6
    ahead.read(6)
    waiting = threading.Thread(target=ahead.room)
    waiting.start()
    ahead.finished()
    waiting.join()
    assert ahead.room() == 2  # one place, and one more
    for _ in range(200):
        ahead.read(1)
        ahead.finished()
    assert ahead.room() == MOST
    time.sleep(1.1 * AHEAD_S)
    assert ahead.room() == 1
    ahead.close()
    assert ahead.room() == 0
