"""Experiment trackers of a run: TensorBoard, Weights & Biases and Trackio."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_platform.errors import ConfigError, Problem
from rl_platform.metrics import Diagnostics, episode_lines, sample_lines
from rl_platform.reporter import Episode, Reporter, RunInfo, Sample
from rl_platform.trackers.logger_media import as_animation, as_markdown, as_table, as_video

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

TRACKERS = {"wandb": "id", "trackio": "name"}
"""Experiment trackers by package, with the argument of their `init` that identifies a run."""


class Tracker(Protocol):
    """A run of one of `TRACKERS`."""

    def log(self, values: dict[str, object], *, step: int) -> None: ...
    def finish(self) -> None: ...


class ExperimentLog(Reporter):
    """Reports to `backends`: TensorBoard events under `tensorboard/` of the run's folder, and `TRACKERS`.

    TensorBoard and Weights & Biases also get the samples and the video. A tracker that fails is reported once, and the
    run continues without it. Raises ConfigError if a backend is not installed.
    """

    def __init__(self, output_dir: str | Path, backends: Sequence[str]) -> None:
        self.output_dir, self.backends = Path(output_dir), list(backends)
        if missing := list(missing_trackers(self.backends)):
            raise ConfigError(missing)
        self._diagnostics = Diagnostics(self.output_dir)
        self._latest = 0  # step
        self._tensorboard: SummaryWriter | None = None
        self._trackers: dict[str, Tracker] = {}

    def start(self, info: RunInfo) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        first_step = 0 if info.resumed_step is None else info.resumed_step + 1
        if "tensorboard" in self.backends:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            # its thread writes within a second; waiting for it would cost a third of a millisecond per step
            folder = str(self.output_dir / "tensorboard")
            self._tensorboard = self._diagnostics.write(
                "tensorboard", lambda: SummaryWriter(folder, purge_step=first_step, flush_secs=1)
            )
        for name in TRACKERS.keys() & self.backends:
            if (tracker := self._diagnostics.write(name, partial(_start_tracker, name, info))) is not None:
                self._trackers[name] = tracker

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest = step
        self._add(step, partial(_summary, metrics))
        for name, tracker in self._trackers.items():
            self._diagnostics.write(name, partial(tracker.log, dict(metrics), step=step))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._show(step, sample_lines(step, samples))

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        self._show(step, episode_lines(step, episodes))

    def _show(self, step: int, lines: Sequence[Mapping[str, object]]) -> None:
        if lines and (writer := self._tensorboard) is not None:
            self._diagnostics.write("tensorboard", lambda: writer.add_text("samples", as_markdown(lines), step))
        if lines and (tracker := self._trackers.get("wandb")) is not None:
            self._diagnostics.write("wandb", lambda: tracker.log({"samples": as_table(lines)}, step=step))

    def video(self, path: Path) -> None:
        step = self._latest
        self._add(step, partial(as_animation, path))
        if (tracker := self._trackers.get("wandb")) is not None:
            self._diagnostics.write("wandb", lambda: tracker.log({"evaluation": as_video(path)}, step=step))

    def _add(self, step: int, summary: Callable[[], Summary]) -> None:
        """Adds an event to TensorBoard's file."""
        if self._tensorboard is not None:
            writer = self._tensorboard.file_writer
            self._diagnostics.write("tensorboard", lambda: writer.add_summary(summary(), step))  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._tensorboard is not None:
            self._diagnostics.write("tensorboard", self._tensorboard.close)
        for name, tracker in self._trackers.items():
            self._diagnostics.write(name, tracker.finish)


def missing_trackers(backends: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each tracker of `runner.logger_backends` whose package is not installed."""
    for name in TRACKERS.keys() & backends:
        if importlib.util.find_spec(name) is None:
            hint = f"pip install {name}"
            yield Problem("runner.logger_backends", f"{name} is not installed", value=name, hint=hint)


def _start_tracker(name: str, info: RunInfo) -> Tracker:
    """Returns a run of the tracker, which continues when the training resumes."""
    id_file = info.output_dir / f"{name}_id"
    resumed = info.resumed_step is not None and id_file.exists()
    identity = id_file.read_text() if resumed else os.urandom(4).hex()
    id_file.write_text(identity)
    options = {TRACKERS[name]: identity}
    if name == "wandb":
        options["dir"] = str(info.output_dir)
    module = importlib.import_module(name)
    run: Tracker = module.init(project=info.experiment, resume="allow", config=dict(info.config), **options)
    return run


def _summary(metrics: Mapping[str, float]) -> Summary:
    """Returns all numbers of a step as one TensorBoard event: adding it waits once for the writer's thread."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])
