"""Stand-ins in tests of parts: contexts, groups that answer at once, a reporter that ignores all calls, placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.placement.scheduler import Host
from rl_platform.records import RolloutBatch, Trajectory
from rl_platform.runtime.host import ComponentContext


def context(name: str = "actor", rank: int = 0, world_size: int = 1) -> ComponentContext:
    return ComponentContext(name=name, rank=rank, world_size=world_size, accelerators=(), seed=3)


def embodied_config(env: dict[str, Any], model: dict[str, Any], algorithm: dict[str, Any], **sections: Any) -> Config:
    """A config of an embodied run in one process; neither observations nor rewards are normalised unless `env` says."""
    known = {"normalize_observations": False, "normalize_rewards": False}
    return Config.model_validate(
        {
            "runner": {"task_type": "embodied"},
            "cluster": {"component_placement": {"actor_critic,env,rollout": "all"}},
            "algorithm": {"loss_type": "actor_critic"} | algorithm,
            "actor": {"model": model},
            "env": known | env,
            **sections,
        }
    )


class Sink:
    """A channel of trajectories into which a component only puts."""

    def __init__(self, found: list[Trajectory]) -> None:
        self.put = found.append


def observed_text(trajectory: Trajectory) -> str:
    """Returns what the policy observed between its turns."""
    assert trajectory.conversation is not None
    pairs = zip(trajectory.token_ids, trajectory.conversation.observed, strict=True)
    return bytes(token for token, observed in pairs if observed).decode()


class ObjectStore:
    """An object store in this process, which keeps bytes as another process would see them."""

    def __init__(self) -> None:
        self.objects: list[list[bytes]] = []

    def store(self, value: Any) -> int:
        self.objects.append([bytes(buffer) for buffer in value])
        return len(self.objects) - 1

    def load(self, references: Sequence[int]) -> list[Any]:
        return [self.objects[reference] for reference in references]


class DirectRollout:
    """A rollout behind both channels of a `RemotePolicy`, in the thread of the caller, and all that passed them."""

    def __init__(self, rollout: Any) -> None:
        self.rollout = rollout
        self.asked: list[Any] = []
        self.answers: list[Any] = []
        self._waiting: list[Any] = []

    def put(self, observations: Any, key: int | None = None) -> None:
        self.asked.append(observations)
        self.answers.append(self.rollout.act(observations))
        self._waiting.append(self.answers[-1])

    def get(self, key: int | None = None) -> Any:
        return self._waiting.pop(0)


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


def placed_host(
    name: str,
    members: Sequence[tuple[str, int]],
    node: int = 0,
    accelerators: tuple[int, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Host:
    return Host(name, node, accelerators, tuple(members), env or {})


@dataclass(frozen=True)
class Placed:
    """A placement of the hosts `host0`, `host1` and so on."""

    hosts: list[Host]

    @classmethod
    def of(cls, *hosts: list[tuple[str, int]], **options: Any) -> Placed:
        """Placed.of([("actor", 0), ("critic", 0)], [("actor", 1)]) has two hosts."""
        return cls([placed_host(f"host{index}", members, **options) for index, members in enumerate(hosts)])

    def world_size(self, component: str) -> int:
        return sum(name == component for host in self.hosts for name, _ in host.members)
