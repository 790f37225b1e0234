"""Evaluates a saved policy from fixed seeds: a table, the same numbers as JSON, and videos.

Each episode or question is done twice: with the most likely action or token, and with sampled ones. Everything runs in
one process on this machine, on its first GPU if it has one. The run may still be going on; its files stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from rl_platform.config import LoadedConfig
from rl_platform.config.overrides import key_of
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.env import Env
from rl_platform.config.schema.models import Critic, Parallel
from rl_platform.config.source import COMMAND_LINE
from rl_platform.envs.embodied.evaluate import EvaluationResult
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.success import success_rates
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import CheckpointError, ConfigError, Problem
from rl_platform.garbage import collect_as_usual
from rl_platform.launch.runtime_choice import runtime_for
from rl_platform.launch.saved.saved_run import SavedRun
from rl_platform.launch.session import task_of
from rl_platform.launch.start_checks.env_spaces import fitting_spaces
from rl_platform.launch.start_checks.extensions import check_extensions
from rl_platform.launch.start_checks.model_checks import check_architectures, check_models
from rl_platform.launch.start_checks.output_check import unwritable
from rl_platform.launch.start_checks.user_code_checks import check_reward, check_tests
from rl_platform.launch.views.console import run_console
from rl_platform.launch.views.headline import number
from rl_platform.launch.views.panels import aligned
from rl_platform.launch.views.plain import PlainView
from rl_platform.launch.written import writing
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.redact import redacted
from rl_platform.reporter import Reporter, Reporters
from rl_platform.runners.embodied import EmbodiedRunner
from rl_platform.runners.reasoning import ReasoningRunner, validation_metric
from rl_platform.runners.trajectories import by_source
from rl_platform.user_code import is_named

Row = dict[str, object]


def evaluate_checkpoint(
    run: SavedRun, loaded: LoadedConfig, overrides: Sequence[str], console: Console | None = None
) -> list[Row]:
    """Evaluates, prints the table and writes it into the run's folder `evaluation`; returns its rows.

    Raises ConfigError for a checkpoint of another version or model, CheckpointError for a damaged one.
    """
    return run.read_by(partial(_evaluated, loaded=loaded, overrides=overrides, console=console))


def _evaluated(run: SavedRun, loaded: LoadedConfig, overrides: Sequence[str], console: Console | None) -> list[Row]:
    """Returns what `evaluate_checkpoint` returns."""
    checkpoint = run.open(loaded.config)
    config, overridden = one_process(loaded.config), {key_of(override) for override in overrides}
    if "env.address" in overridden and not config.env.tasks:  # one environment a connection, as a robot is only one
        config = config.changed({"env.num_envs": config.env.num_workers})
    # the key of the config is about training; on the command line it selects or excludes videos
    decided = "env.evaluation.video" in overridden
    video = config.env.evaluation.video or not (decided or is_named(config.env.backend))
    placement = schedule(config.cluster, inventory := inventory_for(config.cluster))
    if config.runner.task_type == "embodied":
        world: EnvSpaces | Split = fitting_spaces(config)
    else:
        world = build_questions(config.data, config.runner.seed)
        check_tests(config, world)
        check_architectures(config, placement)
        check_reward(config)
        check_extensions(config)
        check_models(config, placement, inventory)
    place = _output(run)
    console = console or run_console()
    reporter = Reporters([PlainView(console)])
    with closing(reporter), ExitStack() as stack:
        with reporter.phase("load"):
            runtime = stack.enter_context(runtime_for(config, placement))
            task = task_of(config, runtime, reporter, run.folder, world, placement, inventory)
            with _fitting(config, overrides):
                task.learned_parts()["actor"].load_state(str(checkpoint.file("actor"))).wait()
                if isinstance(task, EmbodiedRunner):
                    task.groups["env"].use_normalizer(checkpoint.load("env")).wait()
            task.receive(task.publish(0))
        collect_as_usual()
        with reporter.phase("evaluate"):
            if isinstance(task, EmbodiedRunner):
                episodes = f"{config.env.evaluation.episodes} episodes"
                reporter.note(f"{episodes} with the most likely actions, then {episodes} with sampled actions")
                rows = _episodes(task, config.env, place, video, reporter)
            else:
                assert isinstance(task, ReasoningRunner)
                rows = _answers(task, config, place)
    content = {
        "checkpoint": str(run.checkpoint),
        "step": checkpoint.step,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": [redacted(override) for override in overrides],
        "seed": config.env.evaluation.seed if isinstance(task, EmbodiedRunner) else config.runner.seed,
        "rows": rows,
    }
    with writing(place.with_suffix(".json"), [".json"], "--eval") as file:
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    named = f"checkpoint of step {checkpoint.step}: {run.checkpoint}"
    for text in (named, table(rows), f"in numbers: {place.with_suffix('.json')}", *files_of(rows)):
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    return rows


@contextmanager
def _fitting(config: Config, overrides: Sequence[str]) -> Iterator[None]:
    """Raises ConfigError if the policy does not fit an environment that the command line names."""
    try:
        yield
    except CheckpointError as error:
        if not {"env.id", "env.kwargs"} & {key_of(override) for override in overrides}:
            raise
        message = "the policy of this checkpoint has other observations or actions"
        hint = "an environment with the shapes of the run's own"
        raise ConfigError([Problem("env.id", message, value=config.env.id, hint=hint)]) from error


def one_process(config: Config) -> Config:
    """Returns the config without the parts that only training needs, placed on one device of this machine."""
    embodied = config.runner.task_type == "embodied"
    names = "actor_critic,env,rollout" if embodied else "actor,rollout,reward"
    keys = {
        "cluster": Cluster(component_placement={names: "0"}, runtime="local"),
        "runner.max_staleness": 0,
        "runner.warm_start": None,
        "algorithm.use_kl_in_reward": False,
        "algorithm.use_kl_loss": False,
        "algorithm.distillation_coef": 0.0,
        "actor.parallel": Parallel(),
        "actor.cpu_offload": False,
        "actor.offload": False,
        "critic": Critic(),
    }
    if embodied:
        count = min(config.env.num_envs, config.env.evaluation.episodes)
        workers = min(config.env.num_workers, count)
        keys |= {"env.num_envs": count, "env.num_workers": workers, "env.pipeline_stages": 1}
    else:
        keys |= {"rollout.backend": "torch", "rollout.sync": "full", "rollout.offload": False}
    return config.changed(keys)


def _output(run: SavedRun) -> Path:
    """Returns the path of the files of this evaluation, without their suffixes."""
    folder = run.folder / "evaluation"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        message = f"{folder} cannot be made: {error.strerror}"
        raise ConfigError([Problem("--eval", message, where=COMMAND_LINE, value=str(run.folder))]) from error
    if reason := unwritable(folder):  # said before the episodes are played
        raise ConfigError([Problem("--eval", reason, where=COMMAND_LINE, value=str(run.folder))])
    return folder / run.checkpoint.name


def _episodes(task: EmbodiedRunner, env: Env, place: Path, video: bool, reporter: Reporter) -> list[Row]:
    """Returns one row for likely and one for sampled actions, each followed by the rows of several tasks."""
    rows = []
    whole = " ".join([env.name, *(str(env.kwargs[key]) for key in ("env_name",) if key in env.kwargs)])
    for actions in ("deterministic", "sampled"):
        file = place.with_name(f"{place.name}-{actions}.mp4") if video else None
        results = task.evaluate(0, file, actions == "deterministic", last=True)
        if file is not None and (failure := task.drawn()):
            reporter.note(f"no video: {failure}. Going on without")
            file, video = None, False
        rows.append(_row(whole, actions, env.evaluation.episodes, results) | {"video": str(file) if file else None})
        for index, one in enumerate(env.tasks):
            own = [at for at, number in enumerate(results.numbers) if number % len(env.tasks) == index]
            part = EvaluationResult(
                returns=[results.returns[at] for at in own],
                lengths=[results.lengths[at] for at in own],
                successes=[results.successes[at] for at in own],
                invalid=0,
            )
            rows.append(_row(one.name, actions, env.evaluation.episodes // len(env.tasks), part) | {"video": None})
    return rows


def _row(task: str, actions: str, episodes: int, results: EvaluationResult) -> Row:
    """Returns the row of a task. Of `episodes` episodes, those without a result count as invalid."""
    returns, lengths, successes = results.returns, results.lengths, results.successes
    return {
        "task": task,
        "actions": actions,
        "episodes": len(returns),
        "invalid": episodes - len(returns),
        **_spread("return", returns),
        "length": _mean(lengths),
        **{name.removeprefix("val/"): rate for name, rate in success_rates(successes, "val").items()},
        "returns": returns,
        "lengths": lengths,
    }


def _answers(task: ReasoningRunner, config: Config, place: Path) -> list[Row]:
    """Returns one row for greedy and one for sampled answers, and writes the answers into files."""
    settings, rows = config.rollout, []
    metric = validation_metric(config).removeprefix("val/")
    verdict = "correct" if metric == "accuracy" else "score"
    source = config.data.task
    greedy = settings.val_sampling.model_copy(update={"temperature": 0.0})
    for tokens, sampling in (("greedy", greedy), ("sampled", settings.sampling)):
        answers = task.answers(sampling, 0)
        file = place.with_name(f"{place.name}-{tokens}.jsonl")
        lines = (
            {"prompt": answer.prompt.text, "response": answer.text, "reward": answer.reward, verdict: answer.metric}
            for answer in answers
        )
        with writing(file, [".jsonl"], "--eval") as written:
            written.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        whole = "all sources" if source is None else source.name or source.path or source.type
        for label, part in {whole: answers, **by_source(answers)}.items():
            valid = [answer for answer in part if answer.valid]
            rows.append(
                {
                    "task": label,
                    "tokens": tokens,
                    "questions": len(part),
                    metric: _mean([answer.metric for answer in valid]),
                    "standard_error": _standard_error([answer.metric for answer in valid]),
                    "length": _mean([answer.sampled_tokens for answer in part]),
                    "cut": _mean([answer.truncated for answer in part]),
                    "unscored": len(part) - len(valid),
                    "answers": str(file),
                }
            )
    return rows


def _spread(name: str, values: Sequence[float]) -> Row:
    return {
        f"{name}_mean": _mean(values),
        f"{name}_std": _deviation(values),
        f"{name}_min": min(values, default=None),
        f"{name}_max": max(values, default=None),
    }


def _deviation(values: Sequence[float]) -> float | None:
    mean = _mean(values)
    return None if mean is None else math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _standard_error(values: Sequence[float]) -> float | None:
    deviation = _deviation(values)
    return None if deviation is None else deviation / math.sqrt(len(values))


def _mean(values: Sequence[float]) -> float | None:
    return float(sum(values)) / len(values) if values else None


def files_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns a line for each kind of file that the rows name. The rows of several sources name the same file."""
    lines = []
    for kind, name in (("videos", "video"), ("answers", "answers")):
        if paths := dict.fromkeys(str(row[name]) for row in rows if row.get(name)):
            lines.append(f"{kind}: {', '.join(paths)}")
    return lines


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns rows with equal keys as aligned text, without lists and files. `mean` and `std` share a column."""
    hidden = {"returns", "lengths", "video", "answers"}
    partners = {"return_mean": "return_std", "accuracy": "standard_error", "score": "standard_error"}
    names = [name for name in rows[0] if name not in hidden and name not in partners.values()]
    lines = [[name.removesuffix("_mean").removeprefix("return_") for name in names]]
    for row in rows:
        cells = []
        for name in names:
            cell = _cell(row.get(name))
            partner = row.get(partners.get(name, ""))
            cells.append(cell if partner is None else f"{cell} ± {_cell(partner)}")
        lines.append(cells)
    return "\n".join(aligned(lines, left=(0, 1)))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else str(value)
