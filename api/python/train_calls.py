"""`rl.train` and `rl.ppo`: a run within a program of the user."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from os import PathLike
from typing import TypeGuard

from rl_platform.envs.embodied.descriptions import EnvDescription, closing_env, make_env
from rl_platform.errors import ConfigError, Problem, check_all, problems_of
from rl_platform.launch.placed_config import load, located
from rl_platform.python.arguments import Source, as_overrides, as_source
from rl_platform.python.environments import MakeEnv, id_of, registered
from rl_platform.python.one_run import one_run
from rl_platform.python.runs import Run
from rl_platform.reporter import Reporter
from rl_platform.runners.step_callbacks import CALLBACK, Callback

_SHARED: dict[str, object] = {
    "runner.task_type": "embodied",
    "cluster.runtime": "local",
    "cluster.component_placement": {"actor_critic,env,rollout": "0"},
    "algorithm.loss_type": "actor_critic",
    "algorithm.gamma": 0.99,
    "algorithm.gae_lambda": 0.95,
    "algorithm.huber_delta": 10.0,
    "algorithm.ppo_epochs": 10,
    "actor.optim.clip_grad": 0.5,
    "actor.optim.lr_schedule": "linear",
}
_CONTINUOUS: dict[str, object] = {  # as configs/embodied/walker2d.yaml
    "algorithm.value_clip": 0.2,
    "data.mini_batch_size": 64,
    "actor.model.initial_log_std": 0.0,
    "actor.optim.lr": 3e-4,
    "env.num_envs": 32,
    "env.rollout_steps": 64,
}
_DISCRETE: dict[str, object] = {  # as configs/embodied/cartpole.yaml
    "data.mini_batch_size": 256,
    "actor.optim.lr": 1e-3,
    "env.num_envs": 8,
    "env.rollout_steps": 128,
}


def train(
    config: Source,
    overrides: Mapping[str, object] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    show: bool = True,
) -> Run:
    """Trains as `platform-launch CONFIG` does, and returns the run when it ends.

    config: the path of a YAML file, or its content as nested dicts. overrides: values by key, as
    `{"runner.seed": 2}`. callbacks: called after each step, after those of `runner.callbacks`; see `rl.callbacks`.
    show: print what the command prints.

    A run whose folder (`runner.output_dir`) holds checkpoints continues from the newest one. Ctrl-C saves the step and
    raises KeyboardInterrupt; see `docs/python.md`. Raises the errors of `rl.errors`: ConfigError lists all problems.
    """
    return _run(as_source(config), as_overrides(overrides), callbacks, show, None)


def ppo(
    env: str | MakeEnv,
    total_steps: float = 1_000_000,
    *,
    seed: int = 1,
    folder: str | PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    callbacks: Sequence[Callback] = (),
    show: bool = True,
) -> Run:
    """Trains a policy with PPO in a Gymnasium environment, without a config file. Returns the run when it ends.

    env: a registered id, or a function that makes one environment: a class or a lambda works too. total_steps: steps of
    all environments together, rounded up to whole rollouts. folder: where the run is written; a new one in runs/ by
    default. overrides: any keys of `docs/configuration.md`. callbacks, show, errors: as `train`.

    The settings are those of configs/embodied/walker2d.yaml for continuous actions and of cartpole.yaml for discrete
    ones, on one device of this machine. The environment is made in this process, and by the processes of
    `env.num_workers`.
    """
    given = as_overrides(overrides)
    problems: list[Problem] = []
    if not _is_count(total_steps):
        problems.append(Problem("total_steps", "is no number of steps", value=repr(total_steps), allowed="at least 1"))
    env_id = ""
    try:
        env_id = id_of(env)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    name = "ppo_" + re.sub(r"-v\d+$", "", re.split("[:/]", env_id)[-1]).lower()
    with registered(env):
        settings = _SHARED | (_CONTINUOUS if _is_continuous(env_id, given) else _DISCRETE)
        settings |= {"env.id": env_id, "runner.seed": seed, "runner.experiment_name": name}
        settings |= {"runner.output_dir": _new_folder(name) if folder is None else folder}
        settings |= given
        envs, length = settings["env.num_envs"], settings["env.rollout_steps"]
        rollout = envs * length if _is_count(envs) and _is_count(length) else 1  # else they are refused
        last = math.ceil(total_steps / rollout)
        settings |= {
            "runner.max_steps": last,
            "runner.val_check_interval": math.ceil(last / 10),
            "runner.save_interval": math.ceil(last / 5),
        }
        settings |= given
        return _run({}, settings, callbacks, show, None if isinstance(env, str) else env)


def _run(
    config: Source, overrides: Mapping[str, object], callbacks: Sequence[Callback], show: bool, env: MakeEnv | None
) -> Run:
    called = _checked(callbacks)
    with one_run():
        placed = load(config, overrides, starts=True)
        from rl_platform.launch.output import output_path
        from rl_platform.launch.session import run, terminal_view  # loads torch

        path = "" if isinstance(config, Mapping) else str(config)
        with located(placed.loaded):
            reason = run(placed, path, called, terminal_view if show else _NoView)
    return Run(output_path(placed.config), reason, env)


def _checked(callbacks: object) -> list[Callback]:
    """Raises ConfigError with all that cannot be called as the protocol says."""
    if not isinstance(callbacks, Sequence):
        hint = "[callback]"
        raise ConfigError([Problem("callbacks", "is no list", value=repr(callbacks)[:80], allowed="a list", hint=hint)])
    called: list[Callback] = []

    def take(index: int, callback: object) -> None:
        with problems_of(f"callbacks[{index}]", CALLBACK.key):
            called.append(CALLBACK.function(getattr(callback, "__qualname__", repr(callback)[:80]), callback))

    check_all(*(partial(take, index, callback) for index, callback in enumerate(callbacks)))
    return called


def _is_count(number: object) -> TypeGuard[float]:
    """Returns whether it is a whole number from 1 on, of Python or NumPy; 1e6 is one."""
    if not isinstance(number, Real) or isinstance(number, bool):
        return False
    return 1 <= float(number) < math.inf and float(number).is_integer()


def _is_continuous(env_id: str, overrides: Mapping[str, object]) -> bool:
    """Returns whether actions are vectors of floats. True for an environment that cannot be made: the run says why."""
    from gymnasium.spaces import Box

    kwargs = overrides.get("env.kwargs", {})
    try:
        made = make_env(EnvDescription(env_id, kwargs if isinstance(kwargs, dict) else {}))
    except ConfigError:
        return True
    with closing_env(made, env_id) as env:
        return isinstance(env.action_space, Box)


def _new_folder(name: str) -> str:
    """Returns the first of runs/NAME, runs/NAME-2 ... that does not exist."""
    paths = (f"runs/{name}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    return next(path for path in paths if not os.path.exists(path))


class _NoView(Reporter):
    """Shows nothing."""
