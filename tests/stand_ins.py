"""Stand-ins in tests of parts: worker groups that answer at once, a reporter that ignores all calls, placements."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rl_platform.records import RolloutBatch


class Done:
    """The handle of a call that has ended, with the result of its one rank."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self, on_progress: Any = None) -> list[Any]:
        return [self.result]


class FixedGroup:
    """A worker group whose model always gives these `fields`, and which keeps the batches it is to be trained on."""

    def __init__(self, **fields: Tensor) -> None:
        self.fields = fields
        self.evaluations = 0
        self.trained_on: list[RolloutBatch] = []

    def evaluate(self, batch: RolloutBatch) -> Done:
        self.evaluations += 1
        return Done(self.fields)

    def update(self, batch: RolloutBatch, step: int) -> Done:
        self.trained_on.append(batch)
        return Done({})


class DirectGroup:
    """The component of one rank, called at once, and the batches it was trained on."""

    def __init__(self, component: Any) -> None:
        self.component = component
        self.trained_on: list[RolloutBatch] = []

    def evaluate(self, batch: RolloutBatch) -> Done:
        return Done(self.component.evaluate(batch))

    def update(self, batch: RolloutBatch, step: int) -> Done:
        self.trained_on.append(batch)
        return Done(self.component.update(batch, step))

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.component.engine.weights().items()}


class SilentReporter:
    progress = None

    def phase(self, name: str) -> Any:
        return nullcontext()

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class PlacedHost:
    name: str
    members: tuple[tuple[str, int], ...]
    node: int = 0
    accelerators: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Placed:
    """A placement of the hosts `host0`, `host1` and so on."""

    hosts: list[PlacedHost]

    @classmethod
    def of(cls, *hosts: list[tuple[str, int]], **options: Any) -> Placed:
        """Placed.of([("actor", 0), ("critic", 0)], [("actor", 1)]) has two hosts."""
        return cls([PlacedHost(f"host{index}", tuple(members), **options) for index, members in enumerate(hosts)])

    def world_size(self, component: str) -> int:
        return sum(name == component for host in self.hosts for name, _ in host.members)
