"""Dynamic sampling (DAPO, Yu et al. 2025): groups whose samples all score the same are replaced by other prompts.

A group is all samples of one prompt. It is accepted or rejected as a whole, as a filter per sample would delete lone
successes. The caller generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rl_platform.algorithms.variants.filters import GROUPS, GroupFilter, decision
from rl_platform.config.schema.algorithm import DynamicSampling
from rl_platform.errors import CheckpointError, DataError
from rl_platform.records import Prompt, StateDict, Trajectory
from rl_platform.runners.collection.trajectory_states import from_state, state_of

Group = list[Trajectory]


def samples_differ(metrics: Sequence[float], tolerance: float) -> bool:
    """Returns whether max - min of the raw metrics of one group is more than `tolerance`."""
    return bool(metrics) and max(metrics) - min(metrics) > tolerance


def split_groups(trajectories: Iterable[Trajectory], size: int) -> list[Group]:
    """Returns the groups of `size`, in the order in which their prompts appear. A prompt that came twice has two
    groups."""
    groups: dict[tuple[int, int], Group] = {}
    for trajectory in trajectories:
        groups.setdefault((trajectory.prompt.index, trajectory.sample // size), []).append(trajectory)
    return list(groups.values())


@dataclass
class _Counts:
    """The groups that one step generated; `metric` of all its scored responses."""

    rounds: int = 0
    generated: int = 0
    kept: int = 0
    all_correct: int = 0
    all_wrong: int = 0
    metric: list[float] = field(default_factory=list)

    def metrics(self, surplus: int) -> dict[str, float]:
        numbers = {"rounds": self.rounds, "generated": self.generated, "kept": self.kept, "surplus": surplus}
        numbers |= {"all_correct": self.all_correct, "all_wrong": self.all_wrong}
        result = {f"dynamic_sampling/{name}": float(number) for name, number in numbers.items()}
        if self.metric:
            result["dynamic_sampling/metric_mean"] = sum(self.metric) / len(self.metric)
        return result


class DynamicSampler:
    """Fills steps of `groups` groups of `group_size`; the surplus of a step is `carried` to the next one.

    A step trains a whole number of mini-batches of `mini_batch_size` rows, also when it could not be filled.
    """

    def __init__(self, options: DynamicSampling, groups: int, group_size: int, mini_batch_size: int) -> None:
        self.options, self.groups = options, groups
        self.group_size, self.mini_batch_size = group_size, mini_batch_size
        self.carried: list[Group] = []
        self.left_out: Group = []  # of the last step: trajectories that are neither trained on nor carried
        self.filter: GroupFilter | None = GROUPS.load(options.filter) if options.filter else None

    def fill(self, step: int, generate: Callable[[int], list[Trajectory]]) -> tuple[Group, dict[str, float]]:
        """Returns the trajectories of one step, group by group, and metrics. `generate(round)` gives scored responses
        to a new batch of prompts, in their order.

        Carried groups come first, then the accepted ones, in the order of their prompts. Raises DataError when
        `max_rounds` did not give enough and `on_exhausted` does not say what to do instead.
        """
        ready, self.carried = self.carried, []
        rejected: list[Group] = []
        counts = _Counts()
        while len(ready) < self.groups and counts.rounds < self.options.max_rounds:
            for group in split_groups(generate(counts.rounds), self.group_size):
                (ready if self._keeps(group, counts) else rejected).append(group)
            counts.rounds += 1
        taken, surplus = self._take(step, ready, rejected, counts)
        if self.options.surplus == "carry":
            self.carried = surplus
        used = {id(group) for group in (*taken, *self.carried)}
        self.left_out = [one for group in (*ready, *rejected) if id(group) not in used for one in group]
        return [trajectory for group in taken for trajectory in group], counts.metrics(len(surplus))

    def drop(self, oldest: int) -> Group:
        """Removes carried groups with a response of weights before version `oldest`; returns their trajectories."""
        stale = [group for group in self.carried if min(one.weights_version for one in group) < oldest]
        self.carried = [group for group in self.carried if all(group is not other for other in stale)]
        return [one for group in stale for one in group]

    def _keeps(self, group: Group, counts: _Counts) -> bool:
        """By the raw metric or the user's filter; responses without a score do not count."""
        scored = [trajectory for trajectory in group if trajectory.valid]
        metrics = [trajectory.metric for trajectory in scored]
        if self.filter is None:
            keeps = samples_differ(metrics, self.options.tolerance)
        else:
            keeps = bool(scored) and decision(GROUPS, self.options.filter or "", self.filter, scored)
        counts.generated += 1
        counts.kept += keeps
        counts.metric += metrics
        if metrics and not keeps:
            counts.all_correct += min(metrics) >= 1
            counts.all_wrong += max(metrics) <= 0
        return keeps

    def _take(
        self, step: int, ready: list[Group], rejected: list[Group], counts: _Counts
    ) -> tuple[list[Group], list[Group]]:
        """Returns the groups to train on, and the surplus."""
        count = self.groups
        if len(ready) < count:
            match self.options.on_exhausted:
                case "fill_with_rejected":
                    return ready + rejected[: count - len(ready)], []
                case "train_partial":
                    count = len(ready)
                    while count * self.group_size % self.mini_batch_size:
                        count -= 1
                case "error":
                    count = 0
        if count == 0:
            raise DataError(self._exhausted(step, len(ready), counts))
        return ready[:count], ready[count:]

    def _exhausted(self, step: int, ready: int, counts: _Counts) -> str:
        others = counts.generated - counts.kept - counts.all_correct - counts.all_wrong
        needed = f"of {self.groups} groups"
        if self.options.on_exhausted == "train_partial":
            needed = f"groups, which do not fill a mini-batch of {self.mini_batch_size} rows,"
        which = "whose samples differ" if self.filter is None else f"that {self.options.filter} keeps"
        return (
            f"step {step}: {counts.rounds} rounds (algorithm.dynamic_sampling.max_rounds) gave {ready} {needed} "
            f"{which}; of {counts.generated} groups generated, {counts.all_correct} were all right, "
            f"{counts.all_wrong} all wrong and {others} equal otherwise. Use tasks of fitting difficulty, a larger "
            "algorithm.group_size or max_rounds, or another algorithm.dynamic_sampling.on_exhausted"
        )

    def state_dict(self) -> StateDict:
        """Returns the carried groups as plain values; prompts by their index."""
        return {"carried": [[state_of(trajectory) for trajectory in group] for group in self.carried]}

    def load_state_dict(self, state: StateDict, prompts: Mapping[int, Prompt]) -> None:
        """Goes on with the groups of `state`. Raises CheckpointError if they are of another group size."""
        carried = [[from_state(plain, prompts) for plain in group] for group in state["carried"]]
        for group in carried:
            if len(group) != self.group_size:
                raise CheckpointError(
                    f"the checkpoint carries groups of {len(group)} samples, algorithm.group_size is {self.group_size}:"
                    " resume with the group size it was made with"
                )
        self.carried = carried
