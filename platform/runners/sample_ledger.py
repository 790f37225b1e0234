"""Counts the responses of a run: each is trained on once, rejected, or dropped.

    issued = trained + rejected + dropped + in flight

Counts are per prompt, so a response that is lost and another that is trained on twice do not cancel out. In an embodied
run a response is a row of the rollout. A prompt is an environment in one rollout, or the state in which a group of
episodes begins.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from rl_platform.errors import PlatformError
from rl_platform.records import RolloutBatch, StateDict, Trajectory

ENDS = ("trained", "rejected", "dropped")


class Unaccounted(PlatformError):
    """Responses were lost, or trained on twice: an error of the platform."""


class SampleLedger:
    """Counts responses by the index of their prompt; thread-safe.

    trained: rows of updates, including those that masks leave out of the loss. rejected: by dynamic sampling.
    dropped: too old (`runner.stale`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[int] = Counter()  # in flight
        self._counts = dict.fromkeys(("issued", *ENDS), 0)

    def issue(self, prompts: Iterable[int], samples: int) -> None:
        """Counts `samples` responses to each prompt, given by its index, as issued."""
        with self._lock:
            for prompt in prompts:
                self._open[prompt] += samples
                self._counts["issued"] += samples

    def trained(self, prompts: Iterable[int]) -> None:
        """Counts responses as trained on. prompts: the index of each row's prompt.

        Raises Unaccounted for responses that are not in flight.
        """
        self._end("trained", prompts)

    def rejected(self, trajectories: Iterable[Trajectory]) -> None:
        self._end("rejected", (trajectory.prompt.index for trajectory in trajectories))

    def dropped(self, trajectories: Iterable[Trajectory]) -> None:
        self._end("dropped", (trajectory.prompt.index for trajectory in trajectories))

    def _end(self, how: str, prompts: Iterable[int]) -> None:
        ended = Counter(prompts)
        with self._lock:
            if surplus := ended - self._open:
                raise Unaccounted(_message(f"{how} and were not in flight", surplus))
            self._open -= ended
            self._counts[how] += ended.total()

    def check(self, held: Mapping[int, int]) -> None:
        """Raises Unaccounted unless the responses in flight are those of `held`, which the run holds, by prompt.

        Called while nothing is generated. A ledger that has counted nothing takes them over: checkpoints of older
        versions have no counts.
        """
        with self._lock:
            if not self._counts["issued"]:
                self._open = Counter(held)
                self._counts["issued"] = self._open.total()
            if lost := self._open - Counter(held):
                raise Unaccounted(_message("were issued and are lost", lost))
            if surplus := Counter(held) - self._open:
                raise Unaccounted(_message("are held and were not issued", surplus))

    def metrics(self) -> dict[str, float]:
        """Returns totals so far. They depend on the clock: rollouts that are ahead of training count."""
        with self._lock:
            ended = {f"perf/samples_{how}": float(self._counts[how]) for how in ("rejected", "dropped")}
            return ended | {"perf/samples_in_flight": float(self._open.total())}

    def state_dict(self) -> StateDict:
        return {"open": dict(self._open), "counts": dict(self._counts)}

    def load_state_dict(self, state: StateDict) -> None:
        self._open, self._counts = Counter(state["open"]), self._counts | state["counts"]


def held_rows(batches: Iterable[RolloutBatch]) -> Counter[int]:
    """Returns the number of trajectories by prompt."""
    return Counter(index for batch in batches for index in batch.trajectory_ids)


def _message(what: str, counts: Counter[int]) -> str:
    first = ", ".join(f"{count} to prompt {prompt}" for prompt, count in sorted(counts.items())[:5])
    return (
        f"{counts.total()} responses {what} ({first}): this is an error of the platform. The newest checkpoint is from "
        "before it; please report it with metrics.jsonl"
    )
