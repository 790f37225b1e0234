"""Reads the folder of a run for its report. The page lists what the run lacks."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

import yaml

from rl_platform.config.layers import value_at
from rl_platform.config.source import YamlReader
from rl_platform.errors import ConfigError, DataError, PlatformError
from rl_platform.launch.run_lock import is_running
from rl_platform.launch.tools.report.devices import busy_devices, rank_seconds
from rl_platform.launch.tools.report.facts import Facts
from rl_platform.launch.tools.run_headline import headline_of_run
from rl_platform.launch.tools.timeline import TimelineEvent, read_lanes, shown
from rl_platform.metrics import read_metrics
from rl_platform.placement.scheduler import Placement
from rl_platform.redact import without_secrets
from rl_platform.run_files import FINISHED, METRICS
from rl_platform.step_lines import Line, read_lines

Item = TypeVar("Item")
State = Literal["finished", "running", "stopped"]

SAMPLED_STEPS = 24  # steps whose conversations are shown
TOKEN_STEPS = 8  # steps whose tokens are shown
PER_STEP = 8  # conversations of a step
LONGEST_TEXT = 6000  # characters of a prompt or response
MOST_EPISODES = 400
MOST_SPANS = 3000  # of the timeline, the longest ones
DRAWN_STEPS = 2  # of the timeline
EMBEDDED_BYTES = 5_000_000  # of all videos of a report; larger ones are linked
GPUS_PER_NODE = (8, 4, 2, 1, 16)  # tried in this order for a run of another machine


@dataclass(frozen=True)
class LoggedConversation:
    """A sample. sample: its line. tokens: its lines of tokens.jsonl, empty if they were not recorded."""

    sample: Line
    tokens: Sequence[Line] = ()


@dataclass(frozen=True)
class EpisodeVideo:
    """An episode as a film. source: a data URI, or a path relative to the report. facts: of the JSON file beside it:
    step, seed, rewards and values of each step, steps_per_picture, pictures_per_second."""

    name: str
    source: str
    facts: Line


@dataclass(frozen=True)
class RecordedSpans:
    """The last recorded steps. lanes: name -> spans. begin, end: microseconds. dropped: spans too short to draw."""

    lanes: Mapping[str, Sequence[TimelineEvent]]
    begin: float
    end: float
    dropped: int


@dataclass(frozen=True)
class ReportedRun:
    """The content of a report about one run. card: the algorithm as (label, text) lines. placement: an SVG, empty if it
    cannot be drawn. lacks: what is missing and why, by section of the page."""

    name: str
    folder: Path
    state: State
    facts: Facts
    card: Sequence[tuple[str, str]]
    placement: str
    timeline: RecordedSpans | None
    conversations: Sequence[LoggedConversation]
    episodes: Sequence[Line]
    videos: Sequence[EpisodeVideo]
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return str(self.facts.key("runner.task_type") or "")


def collect(runs: Sequence[Path], page: Path) -> list[ReportedRun]:
    """Returns what the folders hold; `page`: the report, to which links are relative.

    Raises DataError with the problems of all damaged runs.
    """
    problems, collected = [], []
    room = EMBEDDED_BYTES
    for path, name in zip(runs, _names(runs), strict=True):
        try:
            run = _run(path, name, page, room)
            room -= sum(len(video.source) for video in run.videos)
            collected.append(run)
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return collected


def state_of(folder: Path) -> State:
    """Returns whether the run in a folder has ended."""
    if (folder / FINISHED).exists():
        return "finished"
    return "running" if is_running(folder) else "stopped"


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Returns at most `count` of the items, the first and the last among them, evenly spread."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _names(runs: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ."""
    parts = [path.absolute().parts for path in runs]
    parts = [each[:-1] if each[-1] == "metrics.jsonl" else each for each in parts]
    depth = 1
    while len({each[-depth:] for each in parts}) < len({*parts}):
        depth += 1
    return ["/".join(each[-depth:]) for each in parts]


def _run(path: Path, name: str, page: Path, room: int) -> ReportedRun:
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name != METRICS:
        raise DataError(f"{path}: is a file; name the output folder of a run, or the {METRICS} in it")
    rows = read_metrics(path)
    lacks: dict[str, str] = {}
    if not rows:
        lacks["curves"] = "metrics.jsonl has no finished step yet."
    config = _config(folder, lacks)
    card, picture, placement = _plan(folder, lacks) if config else ([], "", None)
    lanes = _lanes(folder, lacks)
    headline = headline_of_run(folder, {metric for row in rows for metric in row})
    busy = busy_devices(lanes, placement) if placement is not None else []
    task = (config.get("runner") or {}).get("task_type", "")
    conversations = _conversations(folder, task, lacks)
    return ReportedRun(
        name=name,
        folder=folder,
        state=state_of(folder),
        facts=Facts(rows, headline, config, busy, rank_seconds(lanes)),
        card=card,
        placement=picture,
        timeline=_timeline(lanes, lacks),
        conversations=conversations,
        episodes=_episodes(folder, task, lacks),
        videos=list(_videos(folder, page, room, config, lacks)),
        lacks=lacks,
    )


def _config(folder: Path, lacks: dict[str, str]) -> Line:
    try:
        reader = YamlReader("config.yaml")  # which refuses aliases that repeat one another without end
        tree = reader.read((folder / "config.yaml").read_text(encoding="utf-8"))
        if reader.problems:
            lacks["config"] = f"config.yaml cannot be read: {reader.problems[0].message}."
        elif isinstance(tree, dict) and all(isinstance(section, dict) for section in tree.values()):
            return dict(without_secrets(tree))
        else:
            lacks["config"] = "config.yaml is not the config of a run."
    except FileNotFoundError:
        lacks["config"] = "The folder has no config.yaml."
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        lacks["config"] = f"config.yaml cannot be read: {str(error).splitlines()[0]}."
    lacks["card"] = lacks["placement"] = lacks["config"]
    return {}


def _plan(folder: Path, lacks: dict[str, str]) -> tuple[list[tuple[str, str]], str, Placement | None]:
    """Returns the algorithm card, the picture of the placement and the placement, from config.yaml."""
    from rl_platform.launch.card.run_card import run_card
    from rl_platform.launch.placed_config import load
    from rl_platform.launch.plans.plan_forms import plan

    path, planned, reason = str(folder / "config.yaml"), None, ""
    for gpus in (None, *GPUS_PER_NODE):
        overrides = ["runner.resume=auto", *([] if gpus is None else [f"cluster.gpus_per_node={gpus}"])]
        try:
            planned = load(path, overrides, stored=True)
        except ConfigError as error:
            reason = reason or str(error).splitlines()[1].strip()
            continue
        if gpus is not None:
            lacks["placement note"] = f"This machine has no such GPUs: drawn for nodes with {gpus} GPUs."
        break
    if planned is None:
        lacks["card"] = lacks["placement"] = f"config.yaml does not load here: {reason}"
        return [], "", None
    try:
        picture = plan("svg", planned)
    except PlatformError as error:
        lacks["placement"], picture = f"The placement cannot be drawn here: {error}", ""
    return run_card(planned.config), picture, planned.placement


def _lanes(folder: Path, lacks: dict[str, str]) -> dict[str, list[TimelineEvent]]:
    try:
        return read_lanes(folder)
    except DataError as error:
        lacks["timeline"] = f"{str(error).removeprefix(str(folder) + '/')}."
        return {}


def _timeline(lanes: Mapping[str, Sequence[TimelineEvent]], lacks: dict[str, str]) -> RecordedSpans | None:
    if not lanes:
        return None
    try:
        begin, end = shown(dict(lanes), DRAWN_STEPS)  # type: ignore[arg-type]
    except DataError as error:
        lacks["timeline"] = f"{error}."
        return None
    kept = [(lane, event) for lane, events in lanes.items() for event in events if begin <= event["ts"] < end]
    longest = sorted(kept, key=lambda pair: -pair[1]["dur"])[:MOST_SPANS]
    drawn: dict[str, list[TimelineEvent]] = {lane: [] for lane in lanes}
    for lane, event in longest:
        drawn[lane].append(event)
    return RecordedSpans(
        {lane: events for lane, events in drawn.items() if events}, begin, end, len(kept) - len(longest)
    )


def _lines(path: Path, lacks: dict[str, str], section: str) -> Iterator[Line]:
    """Yields the lines of a file up to a damaged one."""
    try:
        yield from read_lines(path)
    except FileNotFoundError:
        lacks[section] = f"The folder has no {path.name}."
    except (OSError, DataError) as error:
        lacks[section] = f"{str(error).removeprefix(str(path.parent) + '/')}; later lines are left out."


def _conversations(folder: Path, task: str, lacks: dict[str, str]) -> list[LoggedConversation]:
    if task == "embodied":
        return []
    path, tokens_path = folder / "samples.jsonl", folder / "tokens.jsonl"
    steps = list(dict.fromkeys(line["step"] for line in _lines(path, lacks, "conversations") if "prompt" in line))
    with_tokens = list(dict.fromkeys(line["step"] for line in _lines(tokens_path, lacks, "tokens")))
    token_steps = {*evenly(with_tokens, TOKEN_STEPS)}
    chosen = token_steps | {*evenly(steps, SAMPLED_STEPS)}
    tokens: dict[tuple[int, int], list[Line]] = {}
    for line in _lines(tokens_path, lacks, "tokens"):
        if line["step"] in token_steps:
            tokens.setdefault((line["step"], line.get("sample", 0)), []).append(line)
    numbers: dict[int, int] = {}
    conversations = []
    for line in _lines(path, lacks, "conversations"):
        if line["step"] in chosen and "prompt" in line:
            number = numbers[line["step"]] = numbers.get(line["step"], -1) + 1
            if number < PER_STEP:
                conversations.append(_conversation(line, tokens.get((line["step"], number), [])))
    if not conversations:
        lacks.setdefault("conversations", "samples.jsonl has no texts: runner.log_samples is 0, or no step has ended.")
    if conversations and not tokens:
        lacks.setdefault("tokens", "tokens.jsonl is empty: no step with logged tokens has ended.")
    return conversations


def _conversation(line: Line, tokens: Sequence[Line]) -> LoggedConversation:
    """Returns a sample without secrets and with texts of bounded length."""
    texts = {name: value for name, value in line.items() if isinstance(value, str)}
    clean = {name: without_secrets(value) for name, value in texts.items()}
    cut = {
        name: text
        if len(text) <= LONGEST_TEXT
        else f"{text[:LONGEST_TEXT]} [... {len(text) - LONGEST_TEXT} characters]"
        for name, text in clean.items()
    }
    whole = "".join(str(token.get("text", "")) for token in tokens)
    secret = clean != texts or without_secrets(whole) != whole
    return LoggedConversation(line | cut, () if secret else tokens)


def _episodes(folder: Path, task: str, lacks: dict[str, str]) -> list[Line]:
    if task != "embodied":
        return []
    lines = [line for line in _lines(folder / "samples.jsonl", lacks, "episodes") if "return" in line]
    if not lines:
        lacks.setdefault("episodes", "samples.jsonl has no evaluation episodes yet.")
    steps = list(dict.fromkeys(line["step"] for line in lines))
    per_step = max(len(lines) // max(len(steps), 1), 1)
    chosen = {*evenly(steps, max(MOST_EPISODES // per_step, 2))}
    return [{**line, "task": without_secrets(line.get("task", ""))} for line in lines if line["step"] in chosen]


def _videos(folder: Path, page: Path, room: int, config: Line, lacks: dict[str, str]) -> Iterator[EpisodeVideo]:
    paths = [path for pattern in ("*.mp4", "videos/*.mp4", "evaluation/*.mp4") for path in sorted(folder.glob(pattern))]
    paths = [path for path in paths if not path.name.startswith(".") and path.is_file()]
    if not paths and value_at(config, ("runner", "task_type")) == "embodied":
        drawn = value_at(config, ("env", "evaluation", "video"))
        reason = "the environment cannot draw, or none is drawn yet" if drawn else "env.evaluation.video is off"
        lacks["videos"] = f"There is no video: {reason}."
    for path in paths:
        facts: Line = {}
        with suppress(OSError, ValueError, RecursionError):
            read = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            facts = {name: value for name, value in read.items() if _is_plain(value)} if isinstance(read, dict) else {}
        size = path.stat().st_size * 4 // 3
        if size <= room:
            room -= size
            source = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
        else:
            source = _relative(path, page)
        yield EpisodeVideo(str(path.relative_to(folder)), source, facts)


def _is_plain(value: object) -> bool:
    """Returns whether a fact of a video is a number or a list of numbers."""
    items: Iterable[object] = value if isinstance(value, list) else [value]
    return all(isinstance(item, int | float) for item in islice(items, 100_000))


def _relative(path: Path, page: Path) -> str:
    return quote(os.path.relpath(path.absolute(), page.absolute().parent))
