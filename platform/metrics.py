"""Reports of a run: metrics.jsonl, samples.jsonl, tokens.jsonl, TensorBoard, Weights & Biases, Trackio.

`RunLog` writes them; it is a `Reporter`. Not covered: what is reported (`rl_platform.reporter`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.logger_media import as_animation, as_markdown, as_table, as_video
from rl_platform.reporter import Episode, Reporter, RunInfo, Sample, Token
from rl_platform.step_lines import StepLines, read_lines
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

T = TypeVar("T")

TRACKERS = {"wandb": "id", "trackio": "name"}
"""Experiment trackers by package, with the argument of their `init` that identifies a run."""


class Tracker(Protocol):
    """A run of one of `TRACKERS`."""

    def log(self, values: dict[str, object], *, step: int) -> None: ...
    def finish(self) -> None: ...


class RunLog(Reporter):
    """Files of a run: `metrics.jsonl` (one line per step, strict JSON, non-finite numbers as null), `samples.jsonl`,
    `tokens.jsonl`, and those of `backends`: TensorBoard events under `tensorboard/`, the trackers Weights & Biases and
    Trackio. TensorBoard and Weights & Biases also get the samples and the video.

    On resume, lines of steps after the resumed one are cut, so that the file equals that of a run never interrupted
    (less `time/` and rates). `metrics.jsonl` has a line for every step: its lines are on the disk before a checkpoint
    counts, and `StepLines` fills gaps that damage left. The other files are diagnostics: if one cannot be written, a
    warning says so once and the run goes on without it. Raises ConfigError if a backend is not installed.
    """

    def __init__(self, output_dir: str | Path, backends: Sequence[str] = ()) -> None:
        self.output_dir = Path(output_dir)
        self.backends = list(backends)
        if missing := list(missing_trackers(self.backends)):
            raise ConfigError(missing)
        self._metrics: StepLines | None = None
        self._samples: StepLines | None = None
        self._tokens: StepLines | None = None
        self._failed: set[str] = set()
        self._latest = 0  # step
        self._tensorboard: SummaryWriter | None = None
        self._trackers: dict[str, Tracker] = {}

    def start(self, info: RunInfo) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = StepLines(self.output_dir / "metrics.jsonl", info.resumed_step, contiguous=True)
        self._samples = self._diagnosed_lines("samples.jsonl", info)
        if info.task_type == "reasoning":
            self._tokens = self._diagnosed_lines("tokens.jsonl", info)
        first_step = 0 if info.resumed_step is None else info.resumed_step + 1
        if "tensorboard" in self.backends:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            # its thread writes within a second; waiting for it would cost a third of a millisecond per step
            folder = str(self.output_dir / "tensorboard")
            self._tensorboard = self._diagnose(
                "tensorboard", lambda: SummaryWriter(folder, purge_step=first_step, flush_secs=1)
            )
        for name in TRACKERS.keys() & self.backends:
            if (tracker := self._diagnose(name, partial(_start_tracker, name, info))) is not None:
                self._trackers[name] = tracker

    def _diagnose(self, name: str, write: Callable[[], T]) -> T | None:
        """Runs `write`. After its first failure, which a warning reports, diagnostic `name` is not written any more."""
        if name in self._failed:
            return None
        try:
            return write()
        except Exception as error:
            self._failed.add(name)
            log.warning("%s: nothing more is written: %s. The run continues", self.output_dir / name, error)
            return None

    def _diagnosed_lines(self, name: str, info: RunInfo) -> StepLines | None:
        return self._diagnose(name, partial(StepLines, self.output_dir / name, info.resumed_step, contiguous=False))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        assert self._metrics is not None
        self._latest = step
        self._metrics.write({"step": step, **finite})
        if self._tensorboard is not None:
            writer = self._tensorboard.file_writer
            self._diagnose("tensorboard", lambda: writer.add_summary(_summary(metrics), step))
        for name, tracker in self._trackers.items():
            self._diagnose(name, partial(tracker.log, dict(metrics), step=step))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        lines = []
        for sample in samples:
            score = float(sample.reward) if math.isfinite(sample.reward) else None
            line = {"step": step, **sample._asdict(), "reward": score}
            if not sample.verdict:
                del line["verdict"]
            del line["reward_parts"]
            lines.append(line | {f"reward/{name}": part for name, part in sample.reward_parts})
        self._write_samples(step, lines)

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        lines = []
        for episode in episodes:
            line: dict[str, object] = {"step": step, "seed": episode.seed, "return": episode.return_}
            line |= {"length": episode.length, "finish_reason": episode.finish_reason}
            if episode.task:
                line["task"] = episode.task
            if episode.success is not None:
                line["success_once"], line["success_at_end"] = episode.success
            lines.append(line)
        self._write_samples(step, lines)

    def _write_samples(self, step: int, lines: Sequence[Mapping[str, object]]) -> None:
        for line in lines if self._samples is not None else ():
            self._diagnose("samples.jsonl", partial(self._samples.write, line))
        if lines and (writer := self._tensorboard) is not None:
            self._diagnose("tensorboard", lambda: writer.add_text("samples", as_markdown(lines), step))
        if lines and (tracker := self._trackers.get("wandb")) is not None:
            self._diagnose("wandb", lambda: tracker.log({"samples": as_table(lines)}, step=step))

    def video(self, path: Path) -> None:
        step = self._latest
        if (writer := self._tensorboard) is not None:
            self._diagnose("tensorboard", lambda: writer.file_writer.add_summary(as_animation(path), step))
        if (tracker := self._trackers.get("wandb")) is not None:
            self._diagnose("wandb", lambda: tracker.log({"evaluation": as_video(path)}, step=step))

    def tokens(self, step: int, tokens: Sequence[Token]) -> None:
        for token in tokens if self._tokens is not None else ():
            line: dict[str, object] = {"step": step, "sample": token.sample, "text": token.text}
            for name, number in zip(Token._fields[2:], token[2:], strict=True):
                if number is not None and math.isfinite(number):
                    line[name.rstrip("_")] = float(f"{number:.6g}")
            self._diagnose("tokens.jsonl", partial(self._tokens.write, line))

    def sync(self) -> None:
        assert self._metrics is not None
        self._metrics.sync()
        for name, file in (("samples.jsonl", self._samples), ("tokens.jsonl", self._tokens)):
            if file is not None:
                self._diagnose(name, file.sync)

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._tokens):
            if file is not None:
                with suppress(OSError):  # of a line whose write has failed already
                    file.close()
        if self._tensorboard is not None:
            self._diagnose("tensorboard", self._tensorboard.close)
        for name, tracker in self._trackers.items():
            self._diagnose(name, tracker.finish)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl (or of the one in folder `path`), null as NaN; a torn last line is left out.

    Raises DataError if there is no such file or another line is not JSON.
    """
    return list(iter_metrics(path))


def iter_metrics(path: str | Path) -> Iterator[dict[str, float]]:
    """As `read_metrics`, one line at a time."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        for row in read_lines(path):
            yield {name: math.nan if value is None else value for name, value in row.items()}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name the output folder of a run or its metrics.jsonl") from error


def _summary(metrics: Mapping[str, float]) -> Summary:
    """Returns all numbers of a step as one TensorBoard event: adding it waits once for the writer's thread."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])


LOGGER = Extension(
    "logger",
    "runner.logger_backends",
    Reporter,
    "class without arguments that inherits from metrics.Reporter",
)


class UserLogger:
    """The user's logger. Its errors end the run with their traceback."""

    def __init__(self, name: str) -> None:
        kind = LOGGER.load(name)
        with LOGGER.running(name):
            self._logger = kind()
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            with LOGGER.running(self._name):
                return getattr(self._logger, method)(*arguments, **options)

        return call


def user_loggers(backends: Sequence[str]) -> list[Reporter]:
    """The loggers of `runner.logger_backends` that are classes of the user."""
    return [cast(Reporter, UserLogger(name)) for name in backends if ":" in name]


def missing_trackers(backends: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each tracker of `runner.logger_backends` whose package is not installed."""
    for name in TRACKERS.keys() & backends:
        if importlib.util.find_spec(name) is None:
            hint = f"pip install {name}"
            yield Problem("runner.logger_backends", f"{name} is not installed", value=name, hint=hint)


def _start_tracker(name: str, info: RunInfo) -> Tracker:
    """Returns a run of the tracker, which goes on when the training resumes."""
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
