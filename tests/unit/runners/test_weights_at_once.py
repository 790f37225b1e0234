"""Weights that are sent to the rollout while it generates: at its beginning, and after the death of its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rl_platform.errors import ChannelClosed, PlatformError, WorkerDied
from rl_platform.records import Weights
from rl_platform.runners.recovery import Recovery
from rl_platform.runners.scored_responses import ScoredResponses
from rl_platform.runtime.channel import Channel


class Responses(ScoredResponses):
    """Publishes weights of version 1 as soon as they can be sent, while the rollout has those of version 0."""

    def __init__(self, channel: Any) -> None:
        self.requested: list[int] = []
        done = SimpleNamespace(wait=lambda: None)
        rollout = SimpleNamespace(world_size=1, name="rollout", generate=self._generated)
        runtime: Any = SimpleNamespace(channel=channel)
        config: Any = SimpleNamespace(updates_at_once=True)
        groups: Any = {"rollout": rollout, "reward": SimpleNamespace(stream=lambda *_: done)}
        turns: Any = SimpleNamespace(before=lambda _: None)
        reporter: Any = None
        recovery = Recovery(runtime, groups["rollout"])
        recovery.version = 0
        super().__init__(config, runtime, groups, recovery, turns, reporter)

    def _generated(self, *arguments: Any) -> Any:
        self.requested.append(arguments[6])
        return SimpleNamespace(wait=lambda: None)

    @contextmanager
    def _takes(self, updates: Any) -> Iterator[None]:
        with super()._takes(updates):
            assert self.update(Weights(1, {}))
            yield


def test_the_rollout_is_asked_for_the_weights_that_it_has() -> None:
    responses = Responses(lambda name, capacity, *_: Channel(name, capacity, 60.0))
    assert responses.generate([], 1, None, "train", 0) == []  # type: ignore[arg-type]
    assert responses.requested == [0]
    assert responses.recovery.version == 1
    assert not responses.update(Weights(2, {})), "it generates no more"


@pytest.mark.parametrize("error", [ChannelClosed("closed"), WorkerDied("gone")])
def test_a_channel_that_died_with_the_rollout_does_not_end_the_run(error: PlatformError) -> None:
    """Its calls report the death to the recovery, and the next attempt loads the weights."""

    class Dead(Channel[Any]):
        def put(self, *_: Any, **__: Any) -> None:
            raise error

        def close(self, *_: Any) -> None:
            raise error

    kinds = {"updates": Dead}
    responses = Responses(lambda name, capacity, *_: kinds.get(name, Channel)(name, capacity, 60.0))
    responses.generate([], 1, None, "train", 0)  # type: ignore[arg-type]
    assert responses.recovery.version == 1
    assert responses._updates is None
