"""One run from a valid config to its end: checks, output folder, reporters, runtime, task, loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_platform.config import LoadedConfig
from rl_platform.config.python_values import OVERRIDES
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.source import COMMAND_LINE
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import CheckpointError, ConfigError
from rl_platform.extras import find, required
from rl_platform.garbage import collect_as_usual
from rl_platform.interrupts import shutting_down
from rl_platform.launch.output import OutputFolder, output_folder
from rl_platform.launch.placed_config import START_CHECKS, PlacedConfig
from rl_platform.launch.runtime_choice import cluster_for, runtime_for
from rl_platform.metrics import RunLog, user_loggers
from rl_platform.placement.decisions import ESTIMATES, decide
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement
from rl_platform.reporter import Reporter, Reporters, RunInfo
from rl_platform.run_files import CONFIG, complete_checkpoints
from rl_platform.runners.ppo import WATCHING, MakePPO, train
from rl_platform.runners.state import RunState
from rl_platform.runners.step_callbacks import Callback, load_callbacks
from rl_platform.runners.task_runner import TaskRunner
from rl_platform.runtime import Runtime
from rl_platform.user_code import is_named

if TYPE_CHECKING:
    from rl_platform.runners.watching.trace_file import Timeline
    from rl_platform.runtime.ray.run_restarts import RunRestarts


def terminal_view() -> Reporter:
    """Returns the view of a run on standard output; without that extra it shows notes only."""
    return find("rl_platform.launch.views", "plain.terminal_view", _PrintedNotes)()


def run(
    placed: PlacedConfig,
    config_path: str,
    callbacks: Sequence[Callback] = (),
    view: Callable[[], Reporter] = terminal_view,
    ppo_of: MakePPO | None = None,
) -> str:
    """Starts or continues a run. Returns what ended it: see `train`, or `already finished`.

    callbacks: in addition to those of `runner.callbacks`. view: makes what shows the run. ppo_of: as in
    `train`. Raises PlatformErrors with an exit code.
    """
    config = placed.config
    world = _world(config, placed.placement)
    callbacks = [*load_callbacks(config.runner.callbacks), *callbacks]
    with shutting_down(), output_folder(config, placed.loaded.resolved_yaml()) as output:
        restarts = find("rl_platform.runtime.ray", "run_restarts.RunRestarts", _NoRestarts)(config.cluster)
        loop = partial(train, callbacks=callbacks, ppo_of=ppo_of or _failure_recorder(config, output.path))
        return restarts.run(partial(_run_once, placed, config_path, world, output, restarts, view, loop))


def _world(config: Config, placement: Placement) -> EnvSpaces | Split:
    """Returns the spaces of the environment, or the questions, after all checks of the start if they are installed.

    Without the checks, an error ends the run where it happens.
    """
    if (checked := find(START_CHECKS, "every_check.checked", None)) is not None:
        return checked(config, placement)
    if config.runner.task_type == "embodied":
        return inspect_env(EnvDescription.of(config.env).of_task(0)).spaces
    return build_questions(config.data, config.runner.seed)


def _run_once(
    placed: PlacedConfig,
    config_path: str,
    world: EnvSpaces | Split,
    output: OutputFolder,
    restarts: RunRestarts | _NoRestarts,
    view: Callable[[], Reporter],
    loop: Callable[..., str],
) -> str:
    """Runs until the last step or the first error, from the newest checkpoint on. loop: `train`."""
    (_, placement, inventory), config, folder = placed, placed.config, output.path
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # the loop may compute in one thread
        starting = stack.enter_context(ExitStack())
        cluster_is_up = starting.enter_context(cluster_for(config.cluster, placement))  # starts while models are read
        checked_models: Callable[..., int] = find(START_CHECKS, "model_checks.checkpoint_bytes", lambda *_: 0)
        checkpoint_bytes = checked_models(config, placement, inventory, world)
        reporter, timeline = stack.enter_context(_reporting(config, output, inventory, view))
        state = RunState(config, folder, reporter, restarts.saved)
        if key := state.ended_by:
            assert state.resume_from is not None
            reporter.note(
                f"{folder} holds a finished run of {state.resume_from.step} steps.\n"
                f"To continue, raise {key}; to start anew, name another runner.output_dir."
            )
            return "already finished"
        state.store.require_space(checkpoint_bytes)
        state.begin()
        _announce(placed, config_path, world, output, state, reporter)
        attempt = _Attempt(world, inventory, folder, reporter, timeline, state, starting, loop)
        try:
            if config.cluster.reallocate == "off":
                reason = attempt.train_on(config, placement, lambda step: False, cluster_is_up)
            else:
                with required("rl_platform.launch.reallocation", "cluster.reallocate", "cluster.reallocate=off"):
                    from rl_platform.launch.reallocation.reallocate import reallocating

                reason = reallocating(attempt.train_on, placed, reporter, folder, cluster_is_up)
        except BaseException as error:
            if state.restored or not isinstance(error, ConfigError | CheckpointError):  # else it would be raised again
                error.add_note(state.outlook())
            if state.saved:
                restarts.renew()
            raise
        state.finish(reason)
        return reason


@dataclass(frozen=True)
class _Attempt:
    """One attempt to reach the last step, on one placement after another.

    starting: contexts that were entered before the first placement; they end with it. loop: `train`.
    """

    world: EnvSpaces | Split
    inventory: Inventory
    folder: Path
    reporter: Reporters
    timeline: Timeline | None
    state: RunState
    starting: ExitStack
    loop: Callable[..., str]

    def train_on(
        self,
        config: Config,
        placement: Placement,
        leaves: Callable[[int], bool],
        cluster_is_up: Callable[[], None] | None = None,
    ) -> str:
        """Starts the components of a placement, trains and ends them. Returns what `train` returns.

        leaves: as in `train`. cluster_is_up: waits for a cluster that is starting.
        """
        with self.starting.pop_all() as running:
            self.reporter.devices = _devices(placement)
            with self.reporter.phase("load"):
                runtime = running.enter_context(runtime_for(config, placement, cluster_is_up))
                task = task_of(config, runtime, self.reporter, self.folder, self.world, placement, self.inventory)
            collect_as_usual()
            traced = nullcontext() if self.timeline is None else self.timeline.reading(runtime.spans)
            watched: Callable[..., AbstractContextManager[object]] = find(
                WATCHING, "hang_watch.hang_watch", lambda *_: nullcontext()
            )
            with traced, watched(task.groups, self.folder, self.reporter.note, config.runner.deadline_s):
                return self.loop(config, task, self.reporter, self.state, leaves=leaves)


def _announce(
    placed: PlacedConfig,
    config_path: str,
    world: EnvSpaces | Split,
    output: OutputFolder,
    state: RunState,
    reporter: Reporters,
) -> None:
    """Writes config.yaml, and shows the start of the run with all its notes."""
    loaded, placement, inventory = placed
    config = loaded.config
    warnings = "".join(f"# {text}\n" for text in warnings_of(config))
    changes = output.write_config(warnings + loaded.resolved_yaml(), state.resume_from)
    grid = find("rl_platform.planner", "placement_text.render", lambda *_: "")(placement, inventory)
    reporter.start(_info(loaded, config_path, output.path, state, grid, last_step(config, world)))
    chosen = loaded.where("runner.output_dir") in (COMMAND_LINE, OVERRIDES) or state.resume_from is not None
    moved = () if chosen else _of_moved_run(Path(config_path), output.path)
    for note in (*loaded.notes, *changes, *moved, *warnings_of(config)):
        reporter.note(note)
    images = isinstance(world, EnvSpaces) and world.images
    if images and config.env.normalize_observations and not config.env.pixels:
        reporter.note("env.normalize_observations: observations are images, which the model divides by 255 instead")


def _of_moved_run(config_path: Path, folder: Path) -> Iterator[str]:
    """Yields a note if the config is that of a run with checkpoints in another folder, which does not go on."""
    run = config_path.absolute().parent
    if config_path.name == CONFIG and complete_checkpoints(run / "checkpoints") and run.resolve() != folder.resolve():
        yield f"a new run begins in {folder}; that of {config_path} goes on with runner.output_dir={config_path.parent}"


def _failure_recorder(config: Config, folder: Path) -> MakePPO | None:
    """Returns what records a step that fails; None without `runner.record_failure` or that extra."""
    recording = find("rl_platform.launch.replay", "failed_step.FailedStepPPO", None)
    return partial(recording, folder=folder) if recording is not None and config.runner.record_failure else None


def warnings_of(config: Config) -> Iterator[str]:
    """Yields warnings about the run's results, which config.yaml and the card repeat."""
    if config.runner.task_type == "reasoning":
        for key, part in config.reward.parts:
            if part.type == "code" and part.isolation == "none":
                yield f"{key}.isolation is none: programs of the model run with this user's rights on this machine"
    steps = config.runner.max_steps
    for role in ("actor", "critic") if config.critic.use_critic_model else ("actor",):
        optim = getattr(config, role).optim
        if (warmup := optim.lr_warmup_steps) > steps:
            reached = f"the learning rate rises to {optim.lr * steps / warmup:.3g} and never reaches {optim.lr:g}"
            yield f"{role}.optim.lr_warmup_steps is {warmup}, above runner.max_steps {steps}: {reached}"


def last_step(config: Config, world: EnvSpaces | Split) -> int:
    """Returns the step that ends the run: `runner.max_steps`, or the earlier one at which `runner.max_epochs` are over.

    Prompts that are too long to train on are counted, so epochs may be over before it. With dynamic sampling a step
    draws any number of prompts, and `runner.max_steps` is returned.
    """
    steps, epochs = config.runner.max_steps, config.runner.max_epochs
    if epochs is None or not isinstance(world, Split) or config.algorithm.dynamic_sampling is not None:
        return steps
    return min(steps, math.ceil(epochs * len(world.train) / config.data.train_batch_size))


def _info(loaded: LoadedConfig, config_path: str, folder: Path, state: RunState, plan: str, last: int) -> RunInfo:
    config = loaded.config
    return RunInfo(
        experiment=config.runner.experiment_name,
        task_type=config.runner.task_type,
        output_dir=folder,
        max_steps=last,
        config_path=config_path,
        resumed_step=None if state.resume_from is None else state.resume_from.step,
        card=find("rl_platform.launch.card", "run_card.run_card", lambda _: ())(config),
        placement=plan,
        config=loaded.shown(),
    )


def task_of(
    config: Config,
    runtime: Runtime,
    reporter: Reporter,
    folder: Path,
    world: EnvSpaces | Split,
    placement: Placement,
    inventory: Inventory,
) -> TaskRunner:
    """Starts the components of a config and returns its runner. world: spaces of the environment, or the questions."""
    decided = decide(config, placement, inventory)
    for note in decided.notes:
        reporter.note(note)
    if isinstance(world, Split):
        from rl_platform.runners.reasoning import ReasoningRunner

        return ReasoningRunner(decided.config, runtime, reporter, folder, world, decided.order)
    from rl_platform.runners.embodied import EmbodiedRunner

    return EmbodiedRunner(decided.config, runtime, reporter, folder, world, placement.layout.policy)


@contextmanager
def _reporting(
    config: Config, output: OutputFolder, inventory: Inventory, view: Callable[[], Reporter]
) -> Iterator[tuple[Reporters, Timeline | None]]:
    """Yields the run's reporters. Warnings of the platform's own modules become notes."""
    timeline_of: Callable[..., Timeline | None] = find(WATCHING, "trace_file.Timeline", lambda *_: None)
    timeline = timeline_of(output.path / "trace.json", config.runner.trace_steps)
    backends = config.runner.logger_backends
    logs: list[Reporter] = [RunLog(output.path)]
    if trackers := [name for name in backends if not is_named(name)]:
        with required("rl_platform.trackers", "runner.logger_backends", "runner.logger_backends=[]"):
            from rl_platform.trackers.experiment_log import ExperimentLog

        logs.append(ExperimentLog(output.path, trackers))
    logs += user_loggers(backends)
    flops = find(ESTIMATES, "hardware.peak_flops", lambda *_: None)(inventory, config.actor.model.dtype)
    sinks = [*logs, *([] if timeline is None else [timeline]), view()]
    reporter = _RunReporters(sinks, output, flops)
    notes = _Notes(reporter)
    logger = logging.getLogger("rl_platform")
    logger.addHandler(notes)
    try:
        yield reporter, timeline
    finally:
        logger.removeHandler(notes)
        reporter.close()


def _devices(placement: Placement) -> int:
    """Returns the number of GPUs of a run, or of its nodes where it has none."""
    gpus = frozenset[tuple[int, int]]().union(*placement.accelerators.values())
    return len(gpus) or len({host.node for host in placement.hosts})


class _RunReporters(Reporters):
    """Reporters of a run, which keep its output folder from the first step on."""

    def __init__(self, sinks: Sequence[Reporter], output: OutputFolder, flops: float | None) -> None:
        super().__init__(sinks, flops=flops)
        self.output = output

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.output.keep()
        super().step(step, metrics)


class _NoRestarts:
    """Of runs without Ray: threads end with the process of the launcher."""

    saved = False

    def __init__(self, cluster: Cluster) -> None: ...

    def run(self, attempt: Callable[[], str]) -> str:
        return attempt()

    def renew(self) -> None: ...


class _PrintedNotes(Reporter):
    """Prints the notes of a run."""

    def note(self, text: str) -> None:
        print(text, flush=True)


class _Notes(logging.Handler):
    """Reports log records as notes of the run."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self.reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self.reporter.note(record.getMessage())
