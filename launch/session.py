"""One run from a valid config to its end: runtime, reporters, task, loop."""

from __future__ import annotations

import logging
from pathlib import Path

from rl_platform.algorithms.card import algorithm_card
from rl_platform.config import LoadedConfig
from rl_platform.config.schema import Config
from rl_platform.launch.preflight import check_available, check_memory, prepare_output
from rl_platform.launch.view import terminal_view
from rl_platform.metrics import Reporter, Reporters, RunInfo, RunLog
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.plan import render
from rl_platform.placement.scheduler import Placement
from rl_platform.runners.ppo import Task, train
from rl_platform.runners.state import RunState
from rl_platform.runtime import Runtime
from rl_platform.runtime.local import LocalRuntime


def run(loaded: LoadedConfig, config_path: str, placement: Placement, inventory: Inventory) -> None:
    """Start or continue the run and stay until it ends. Errors are PlatformErrors with an exit code."""
    config = loaded.config
    check_available(config, placement)
    checkpoint_bytes = check_memory(config, placement)
    spaces = _spaces(config) if config.runner.task_type == "embodied" else None
    output_dir = prepare_output(config)
    store, resume_from = RunState.find(config, output_dir)
    if resume_from is not None and resume_from.step >= config.runner.max_steps:
        print(
            f"{output_dir} holds a finished run of {resume_from.step} steps. To go on, raise runner.max_steps; "
            "to start afresh, name another runner.output_dir."
        )
        return
    store.require_space(checkpoint_bytes)
    (output_dir / "config.yaml").write_text(loaded.resolved_yaml(), encoding="utf-8")
    info = RunInfo(
        experiment=config.runner.experiment_name,
        task_type=config.runner.task_type,
        output_dir=output_dir,
        max_steps=config.runner.max_steps,
        config_path=config_path,
        resumed_step=None if resume_from is None else resume_from.step,
        card=card(config),
        placement=render(placement, inventory),
        config=config.model_dump(mode="json"),
    )
    reporter = Reporters([RunLog(output_dir, config.runner.logger_backends), terminal_view()])
    logging.getLogger("rl_platform").addHandler(_Notes(reporter))
    try:
        reporter.start(info)
        with reporter.phase("start"):
            runtime = LocalRuntime(placement, config.runner.deadline_s, config.runner.seed)
        with runtime:
            with reporter.phase("load"):
                task = _task(config, runtime, reporter, output_dir, spaces, placement)
            train(config, task, reporter, RunState(store, resume_from, reporter))
    finally:
        reporter.close()


def card(config: Config) -> list[tuple[str, str]]:
    """The algorithm card of a config."""
    rows = config.env.num_envs * config.env.rollout_steps
    if config.runner.task_type == "reasoning":
        rows = config.data.train_batch_size * config.algorithm.group_size
    return algorithm_card(
        config.algorithm,
        rows_per_rollout=rows,
        mini_batch_size=config.data.mini_batch_size,
        task_type=config.runner.task_type,
    )


def _task(
    config: Config, runtime: Runtime, reporter: Reporter, output_dir: Path, spaces: object, placement: Placement
) -> Task:
    if config.runner.task_type == "reasoning":
        from rl_platform.runners.reasoning import ReasoningTask

        return ReasoningTask(config, runtime, reporter, output_dir)
    from rl_platform.runners.embodied import EmbodiedTask

    actor = "actor_critic" if "actor_critic" in placement.components else "actor"
    return EmbodiedTask(config, runtime, reporter, output_dir, spaces, actor)


def _spaces(config: Config) -> object:
    """What the environment looks like; an id that does not exist ends here."""
    from rl_platform.envs.embodied.spaces import EnvDescription, make_env, read_spaces

    env = make_env(EnvDescription(config.env.id, config.env.kwargs, config.env.max_episode_steps))
    try:
        return read_spaces(env, config.env.id)
    finally:
        env.close()


class _Notes(logging.Handler):
    """Warnings of the platform's own modules appear as notes of the run."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self.reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self.reporter.note(record.getMessage())
