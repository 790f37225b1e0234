"""What `PPO` gets in tests without a runtime: worker groups that answer at once, a reporter that says nothing."""

from __future__ import annotations

from contextlib import nullcontext
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
