"""Reports of a run: metrics.jsonl, samples.jsonl, tokens.jsonl, and loggers of the user.

`RunLog` writes the files; it is a `Reporter`. Not covered: what is reported (`rl_platform.reporter`), and the trackers
TensorBoard, Weights & Biases and Trackio (`rl_platform.trackers`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from rl_platform.errors import DataError
from rl_platform.reporter import Episode, Reporter, RunInfo, Sample, Token
from rl_platform.run_files import METRICS
from rl_platform.step_lines import StepLines, read_lines
from rl_platform.user_code import Extension

log = logging.getLogger(__name__)

SAMPLES, TOKENS = "samples.jsonl", "tokens.jsonl"

T = TypeVar("T")


class Diagnostics:
    """Files in `folder` that a run can do without: after the first failure of one, a warning, it is not written."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._failed = folder, set[str]()

    def write(self, name: str, function: Callable[[], T]) -> T | None:
        """Returns the result of `function`, which writes `name`; None if this or an earlier call has failed."""
        if name in self._failed:
            return None
        try:
            return function()
        except Exception as error:
            self._failed.add(name)
            log.warning("%s: nothing more is written: %s. The run continues", self._folder / name, error)
            return None


class RunLog(Reporter):
    """Files of a run: `metrics.jsonl` (one line per step, strict JSON, non-finite numbers as null), `samples.jsonl` and
    `tokens.jsonl`.

    On resume, lines of steps after the resumed one are cut, so that the file equals that of a run never interrupted
    (less `time/` and rates). `metrics.jsonl` has a line for every step: its lines are on the disk before a checkpoint
    counts, and `StepLines` fills gaps that damage left. The other files are diagnostics. If one cannot be written, the
    run logs one warning and continues without it.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.output_dir = Path(output_dir)
        self._diagnostics = Diagnostics(self.output_dir)
        self._metrics: StepLines | None = None
        self._texts: dict[str, StepLines] = {}  # the other files, by name

    def start(self, info: RunInfo) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = StepLines(self.output_dir / METRICS, info.resumed_step, contiguous=True)
        for name in (SAMPLES, TOKENS) if info.task_type == "reasoning" else (SAMPLES,):
            opening = partial(StepLines, self.output_dir / name, info.resumed_step, contiguous=False)
            if (file := self._diagnostics.write(name, opening)) is not None:
                self._texts[name] = file

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        assert self._metrics is not None
        self._metrics.write({"step": step, **finite})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._write(SAMPLES, sample_lines(step, samples))

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        self._write(SAMPLES, episode_lines(step, episodes))

    def tokens(self, step: int, tokens: Sequence[Token]) -> None:
        lines = []
        for token in tokens:
            line: dict[str, object] = {"step": step, "sample": token.sample, "text": token.text}
            for name, number in zip(Token._fields[2:], token[2:], strict=True):
                if number is not None and math.isfinite(number):
                    line[name.rstrip("_")] = number if isinstance(number, int) else float(f"{number:.6g}")
            lines.append(line)
        self._write(TOKENS, lines)

    def _write(self, name: str, lines: Sequence[Mapping[str, object]]) -> None:
        if (file := self._texts.get(name)) is not None:
            for line in lines:
                self._diagnostics.write(name, partial(file.write, line))

    def sync(self) -> None:
        assert self._metrics is not None
        self._metrics.sync()
        for name, file in self._texts.items():
            self._diagnostics.write(name, file.sync)

    def close(self) -> None:
        for file in (self._metrics, *self._texts.values()):
            if file is not None:
                with suppress(OSError):  # of a line whose write has failed already
                    file.close()


def sample_lines(step: int, samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Returns the records of responses for logs."""
    lines = []
    for sample in samples:
        score = float(sample.reward) if math.isfinite(sample.reward) else None
        line = {"step": step, **sample._asdict(), "reward": score}
        if not sample.verdict:
            del line["verdict"]
        del line["reward_parts"]
        lines.append(line | {f"reward/{name}": part for name, part in sample.reward_parts})
    return lines


def episode_lines(step: int, episodes: Sequence[Episode]) -> list[dict[str, object]]:
    """Returns the records of evaluation episodes for logs."""
    lines = []
    for episode in episodes:
        line: dict[str, object] = {"step": step, "seed": episode.seed, "return": episode.return_}
        line |= {"length": episode.length, "finish_reason": episode.finish_reason}
        if episode.task:
            line["task"] = episode.task
        if episode.success is not None:
            line["success_once"], line["success_at_end"] = episode.success
        lines.append(line)
    return lines


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Returns the lines of a metrics.jsonl (or of the one in folder `path`), null as NaN; a torn last line is left out.

    Raises DataError if there is no such file, another line is not JSON, or a value is not a finite number.
    """
    return list(iter_metrics(path))


def iter_metrics(path: str | Path) -> Iterator[dict[str, float]]:
    """As `read_metrics`, one line at a time."""
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    try:
        for row in read_lines(path, texts=False):
            yield {name: math.nan if value is None else value for name, value in row.items()}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name the output folder of a run or its metrics.jsonl") from error


LOGGER = Extension(
    "logger", "runner.logger_backends", Reporter, "class without arguments that inherits from metrics.Reporter"
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
    """Returns the loggers of `runner.logger_backends` that are classes of the user."""
    return [cast(Reporter, UserLogger(name)) for name in backends if ":" in name]
