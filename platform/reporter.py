"""The reports of runners, and the interface that receives them.

Runners call one `Reporter`. Theirs is `Reporters`, which times phases, derives rates and passes every call to its
sinks; sinks implement the same protocol. Metric names: reward/, adv/, actor/, critic/, len/, episode/, env/, val/,
time/ (seconds), perf/. A count (`perf/tokens`, `perf/env_steps`) also gives its rate (`perf/tokens_per_sec`), of the
training step alone.

Not covered: computing the metrics; the files of a run (`rl_platform.metrics`) and views (`launch/views/`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rl_platform.redact import redacted

log = logging.getLogger(__name__)
LONGEST_NOTE = 20_000  # characters


class Sample(NamedTuple):
    """A response for the log. prompt: as the model read it, with the chat template. finish_reason: see `Trajectory`.
    verdict: how the tests of a program ended, empty for other rewards. reward_parts: (name, score) of each of several
    reward functions."""

    prompt: str
    response: str
    reward: float
    answer: str = ""
    finish_reason: str = ""
    verdict: str = ""
    reward_parts: tuple[tuple[str, float], ...] = ()


class Token(NamedTuple):
    """A token of a response, by the number of its sample in the step, and the numbers that the update used.

    None: there is no such number. rollout_log_prob: of the rollout engine; log_prob: of the training engine before the
    update; new_log_prob: after it. reward: with a KL penalty in it. version: of the weights that sampled the token.
    """

    sample: int
    text: str
    rollout_log_prob: float | None = None
    log_prob: float | None = None
    new_log_prob: float | None = None
    reference_log_prob: float | None = None
    value: float | None = None
    reward: float | None = None
    advantage: float | None = None
    return_: float | None = None
    version: int | None = None


class Episode(NamedTuple):
    """An evaluation episode for the log: its seed, task (empty: the only one), sum of raw rewards and steps.

    success: whether it was reached at any step and at the last one; None: not reported. return_ None: the episode is
    invalid.
    """

    seed: int
    task: str = ""
    return_: float | None = None
    length: int | None = None
    finish_reason: str = "invalid"  # or terminated, or truncated
    success: tuple[bool, bool] | None = None


RATED = ("tokens", "env_steps", "samples")
"""Counts `perf/<name>` of one step from which `Reporters` derives `perf/<name>_per_sec`."""

NOT_TRAINING = ("load", "log tokens", "validate", "checkpoint", "export", "reallocate")
"""Phases whose seconds are in `time/step` and do not count for the rates."""


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for its reporters. resumed_step: step of the checkpoint, None for a fresh run.

    card: the algorithm as (label, text) lines; placement: components and GPUs as a text grid; config: resolved, without
    secrets.
    """

    experiment: str
    task_type: str
    output_dir: Path
    max_steps: int
    config_path: str = ""
    resumed_step: int | None = None
    card: Sequence[tuple[str, str]] = ()
    placement: str = ""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class Reporter:
    """The interface for runners. Thread-safe; a call never waits for a terminal or a network.

    A sink that inherits from it ignores the calls that it does not override.
    """

    def __init__(self) -> None:
        """A logger of `runner.logger_backends` is made without arguments."""

    def start(self, info: RunInfo) -> None:
        """Receives the facts of the run, once, before the first step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Names the phase of the block; the seconds of `with reporter.phase("generate"):` become `time/generate`."""
        return nullcontext()

    def progress(self, done: int, total: int, unit: str, **numbers: float) -> None:
        """Shows the progress of the current phase, with a few numbers of interest; `total` 0: unknown."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives all metrics of a finished step, with those of its validation, once and before its checkpoint."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Receives generated texts of the step."""

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        """Receives evaluation episodes after the step."""

    def video(self, path: Path) -> None:
        """Receives the video of an evaluation episode, which was drawn after the latest step."""

    def tokens(self, step: int, tokens: Sequence[Token]) -> None:
        """Receives the tokens of the first generated texts of the step. It is not called in every step."""

    def sync(self) -> None:
        """Returns when the steps so far would survive a power loss. Called before a checkpoint counts."""

    def note(self, text: str) -> None:
        """Shows a sentence to the user: a warning, a saved checkpoint, a restarted worker."""

    def close(self) -> None:
        """Ends the report, once, after the last step or after an error."""


class Reporters(Reporter):
    """Passes every call to `sinks`, in order, and adds timings and rates to the metrics."""

    def __init__(self, sinks: Sequence[Reporter], devices: int = 1, flops: float | None = None) -> None:
        """devices: GPUs of the run, or its nodes where it has none. flops: what one computes in a second at most."""
        self.sinks, self.devices, self._flops = list(sinks), devices, flops
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._added: dict[str, float] = {}
        self._step_began = time.perf_counter()

    def start(self, info: RunInfo) -> None:
        for sink in self.sinks:
            sink.start(info)
        self._step_began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with ExitStack() as stack:
                for sink in self.sinks:
                    stack.enter_context(sink.phase(name))
                yield
        finally:
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def progress(self, done: int, total: int, unit: str, **numbers: float) -> None:
        for sink in self.sinks:
            sink.progress(done, total, unit, **numbers)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports the metrics of a step. Adds `time/<phase>`, `time/step`, rates, and of language models `perf/mfu`.

        `time/step`: wall seconds since the step before, with validation and the checkpoint of the step before. Rates
        are counts divided by the seconds of the training step alone: `time/step` without the phases `NOT_TRAINING`.
        """
        now = time.perf_counter()
        with self._lock:
            times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
            self._seconds.clear()
            added, self._added = self._added, {}
            times["time/step"] = now - self._step_began
            self._step_began = now
        complete = {name: float(value) for name, value in metrics.items()} | added | times
        training = times["time/step"] - sum(times.get(f"time/{name}", 0.0) for name in NOT_TRAINING)
        for name in RATED:
            if f"perf/{name}" in complete:
                complete[f"perf/{name}_per_sec"] = complete[f"perf/{name}"] / max(training, 1e-9)
        if "perf/tokens_per_sec" in complete:
            complete["perf/tokens_per_second_per_gpu"] = complete["perf/tokens_per_sec"] / self.devices
        if "perf/flops" in complete and self._flops is not None:
            complete["perf/mfu"] = complete["perf/flops"] / (max(training, 1e-9) * self.devices * self._flops)
        for sink in self.sinks:
            sink.step(step, complete)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to those of the next step."""
        with self._lock:
            self._added |= metrics

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sink in self.sinks:
            sink.samples(step, samples)

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        for sink in self.sinks:
            sink.episodes(step, episodes)

    def video(self, path: Path) -> None:
        for sink in self.sinks:
            sink.video(path)

    def tokens(self, step: int, tokens: Sequence[Token]) -> None:
        for sink in self.sinks:
            sink.tokens(step, tokens)

    def sync(self) -> None:
        for sink in self.sinks:
            sink.sync()

    def note(self, text: str) -> None:
        if (more := len(text) - LONGEST_NOTE) > 0:  # as an error of user code that contains its arrays
            half = LONGEST_NOTE // 2
            text = f"{text[:half]} [... {more:,} characters ...] {text[-half:]}"
        # half of a surrogate pair, as in a file name that is not UTF-8, would raise in a file or an output of UTF-8
        shown = redacted(text).encode(errors="backslashreplace").decode()
        for sink in self.sinks:
            sink.note(shown)

    def close(self) -> None:
        with ExitStack() as stack:  # every sink is closed, even if one fails
            for sink in reversed(self.sinks):
                stack.callback(sink.close)
