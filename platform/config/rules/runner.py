"""Rules of `runner`: the run as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath

from rl_platform.config.rules.rule import CHUNKS, TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.runner import LOGGERS
from rl_platform.errors import Problem
from rl_platform.user_code import is_named


def _leaves_its_folder(name: str) -> bool:
    path = PurePath(name)
    return path.is_absolute() or ".." in path.parts or not path.parts


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `runner`."""
    runner, algorithm = config.runner, config.algorithm
    if when(lambda: _leaves_its_folder(runner.experiment_name)):
        message = "becomes a folder in runs/, so it is no absolute path and has no part `..`"
        hint = "set runner.output_dir to write to another folder"
        yield Problem("runner.experiment_name", message, value=runner.experiment_name, hint=hint)
    if when(lambda: runner.resume not in ("auto", "never") and not Path(runner.resume).exists()):
        yield Problem("runner.resume", "neither auto nor never, and there is no checkpoint at this path")
    for index, name in enumerate(when(lambda: runner.logger_backends) or ()):
        if unknown := unknown_name(f"runner.logger_backends[{index}]", name, LOGGERS, "Class"):
            yield unknown
    for index, name in enumerate(when(lambda: runner.callbacks) or ()):
        if unknown := unknown_name(f"runner.callbacks[{index}]", name, ()):
            yield unknown
    if when(lambda: runner.max_staleness and algorithm.rollout_is is None and algorithm.old_log_probs != "rollout"):
        yield Problem(
            "runner.max_staleness",
            "rollouts come from weights that are one or more updates old, which needs a correction",
            hint="algorithm.rollout_is: {}",
        )
    if when(lambda: embodied(config) and runner.warm_start is not None):
        yield from _warm_start(config)


def _warm_start(config: Config) -> Iterator[Problem]:
    """Yields what cannot be cloned: demonstrations hold observations and actions of single steps."""
    model, key = config.actor.model, "runner.warm_start"
    if when(lambda: model.type not in ("mlp", "cnn") and not is_named(model.type)):
        message = f"demonstrations of single steps cannot train a policy of type {config.actor.model.type}"
        yield Problem(key, message, hint="actor.model.type: mlp")
    if when(lambda: model.num_action_chunks > 1):
        yield Problem(key, f"demonstrations have single actions, and the policy chooses several ({CHUNKS})")
    if when(lambda: model.action_distribution == "squashed"):
        message = "the sample behind a squashed action cannot be recovered from an action near a bound"
        yield Problem(key, message, hint="actor.model.action_distribution: gaussian")
    if when(lambda: config.env.pixels is not None):
        yield Problem(key, "demonstrations are read without images, which this environment observes (env.pixels)")


def _stale(config: Config) -> Iterator[Unread]:
    """Yields the cases in which nothing is older than `runner.max_staleness` updates."""
    sampling, partial = config.algorithm.dynamic_sampling, config.rollout.partial_rollout
    if when(lambda: embodied(config)):
        yield Unread("runner.stale", "all steps of an embodied rollout have the same age", (TASK,))
    elif when(lambda: not config.runner.max_staleness):
        yield Unread("runner.stale", "runner.max_staleness is 0", ("runner.max_staleness",))
    elif when(lambda: partial is None and (sampling is None or sampling.surplus == "drop")):
        reason = (
            "no response is older than max_staleness: only rollout.partial_rollout and the surplus that "
            "algorithm.dynamic_sampling carries make them so"
        )
        yield Unread("runner.stale", reason, ("rollout.partial_rollout", "algorithm.dynamic_sampling"))


def unread(config: Config) -> Iterator[Unread]:
    """Yields the keys of `runner` that this config does not read, each with the reason."""
    yield from _stale(config)
    if when(lambda: embodied(config)):
        yield from unread_keys(
            "runner", "max_epochs log_samples", "embodied training has no data set and no texts", TASK
        )
    if when(lambda: reasoning(config)):
        yield Unread("runner.warm_start", "language models start from trained weights (actor.model.path)", (TASK,))
        yield from unread_keys(
            "runner", "trust_checkpoint", "loading a checkpoint of language models runs no code", TASK
        )
