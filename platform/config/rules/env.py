"""Rules of `env`: the simulation, its processes and its tasks.

Properties of the environment itself, such as its spaces, are checked when it is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules.rule import CHUNKS, TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import estimator_needs
from rl_platform.config.schema.env import EnvTask
from rl_platform.config.schema.models import INSTRUCTED
from rl_platform.errors import Problem
from rl_platform.user_code import is_named

_MODEL, _PIXELS, _TASKS = "actor.model.type", "env.pixels", "env.tasks"
_EPISODE, _STEPS = "env.max_episode_steps", "env.rollout_steps"
_BACKENDS = ("mujoco", "mujoco_warp")
WARP_CANNOT = ("num_workers", "pixels", "tasks", "python")  # keys of `env`


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `env`."""
    if not when(lambda: embodied(config)):
        return
    env, actor = config.env, config.actor
    if when(lambda: not env.name):
        yield Problem("env.id", "embodied training needs an environment", hint="for example CartPole-v1")
    for name in ("num_envs", "num_workers"):
        yield from _stages(config, name)
    if when(lambda: env.rollout_steps % actor.model.num_action_chunks):
        chunks = f"chunks of {actor.model.num_action_chunks} actions ({CHUNKS})"
        yield Problem("env.rollout_steps", f"{chunks} do not divide the steps of a rollout")
    yield from _whole_episodes(config)
    backend = when(lambda: env.backend)
    if backend == "mujoco_warp":
        for name in WARP_CANNOT:
            yield from _warp(config, name)
    elif backend and (unknown := unknown_name("env.backend", backend, _BACKENDS, "Class")):
        yield unknown
    elif backend:
        yield from _processes(config)
    if backend and is_named(backend) and when(lambda: env.max_episode_steps is None):
        message = f"env.backend {backend} has no registered time limit, so an episode may never end"
        yield Problem(_EPISODE, message, hint="for example env.max_episode_steps: 1000")
    tasks = when(lambda: env.tasks) or []
    count, multiple = len(tasks), f"a multiple of {len(tasks)}"
    if count and when(lambda: env.num_envs % count):
        message = f"{count} tasks (env.tasks) cannot share {env.num_envs} environments equally"
        yield Problem("env.num_envs", message, hint=multiple)
    if count and when(lambda: env.evaluation.episodes % count):
        message = f"{count} tasks (env.tasks) cannot share {env.evaluation.episodes} episodes equally"
        yield Problem("env.evaluation.episodes", message, hint=multiple)
    for index, task in enumerate(tasks):
        yield from _task(config, task, f"{_TASKS}[{index}]", tasks[:index])


def _whole_episodes(config: Config) -> Iterator[Problem]:
    env, size = config.env, "algorithm.group_size"
    if not when(lambda: config.whole_episodes and not estimator_needs(config.algorithm.adv_type).values):
        return
    limit = when(lambda: env.max_episode_steps or 0)
    if limit == 0:
        message = f"loss_type actor plays whole episodes in every rollout: their longest length divides {_STEPS}"
        yield Problem(_EPISODE, message, hint=f"as {_EPISODE}: 200")
    elif limit and when(lambda: env.rollout_steps % limit):
        message = f"loss_type actor plays whole episodes in every rollout, of up to {limit} steps"
        yield Problem(_STEPS, message, hint=f"a multiple of {_EPISODE}")
    elif limit and when(lambda: limit % config.actor.model.num_action_chunks):
        chunks = f"chunks of {config.actor.model.num_action_chunks} actions ({CHUNKS})"
        yield Problem(_EPISODE, f"{chunks} do not divide it, and an episode begins where a chunk does")
    elif limit and when(lambda: limit % config.sequence_length):
        message = f"sequences of {config.sequence_length} steps do not divide it, and an episode begins where one does"
        yield Problem(_EPISODE, message, hint=f"actor.model.sequence_length: {limit}")
    groups, tasks = when(lambda: env.num_envs / config.algorithm.group_size), when(lambda: max(len(env.tasks), 1))
    if groups and groups != int(groups):
        message = f"groups of {config.algorithm.group_size} ({size}) do not divide it"
        yield Problem("env.num_envs", message, hint=f"a multiple of {size}")
    elif groups and tasks and groups % tasks:
        message = f"{tasks} tasks (env.tasks) cannot share {int(groups)} groups of {size} evenly"
        yield Problem("env.num_envs", message, hint=f"a multiple of {tasks * config.algorithm.group_size}")


def _stages(config: Config, name: str) -> Iterator[Problem]:
    if when(lambda: getattr(config.env, name) % config.env.pipeline_stages):
        message = f"these stages do not divide env.{name}, {getattr(config.env, name)}"
        yield Problem("env.pipeline_stages", message)


def _processes(config: Config) -> Iterator[Problem]:
    env, key = config.env, "env.num_workers"
    if when(lambda: env.num_workers > env.num_envs):
        yield Problem(key, f"more processes than environments: env.num_envs is {env.num_envs}")
    elif when(lambda: env.num_workers and env.num_envs % env.num_workers):
        yield Problem(key, f"{env.num_envs} environments (env.num_envs) cannot be shared equally by these processes")
    if when(lambda: env.address is not None):
        yield from _servers(config)
    elif when(lambda: env.python is not None and env.num_workers == 0):
        yield Problem(key, "env.python is the interpreter of env processes", hint="for example env.num_workers: 2")
    elif when(lambda: env.pixels is not None and env.num_workers == 0):
        message = f"{_PIXELS} requires env processes, so that a crash of the graphics library does not end the run"
        yield Problem(key, message, hint="about one per core, for example env.num_workers: 2")


def _servers(config: Config) -> Iterator[Problem]:
    env, key = config.env, "env.address"
    addresses = when(lambda: env.addresses) or ()
    for address in addresses:
        host, _, port = address.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not host or (":" in host) != bracketed or not port.isdecimal() or not 0 < int(port) < 65536 or " " in host:
            allowed, hint = "host:port", "127.0.0.1:5555, or [::1]:5555 with an IPv6 address"
            yield Problem(key, "not an address of a server", value=address, allowed=allowed, hint=hint)
    if when(lambda: env.num_workers == 0 or env.num_workers % len(addresses)):
        message = "every server in env.address needs the same number of connections, at least one"
        hint = f"env.num_workers={len(addresses)}, or a multiple of it"
        yield Problem("env.num_workers", message, hint=hint)


def _warp(config: Config, name: str) -> Iterator[Problem]:
    if when(lambda: getattr(config.env, name)):
        message = "MuJoCo Warp steps all environments in one process, with one task and without images"
        yield Problem(f"env.{name}", message, hint="env.backend: mujoco")


def _task(config: Config, task: EnvTask, key: str, before: list[EnvTask]) -> Iterator[Problem]:
    if when(lambda: task.name in [other.name for other in before]):
        yield Problem(f"{key}.name", f"another task is named {task.name}, and names of metrics contain it")
    if when(lambda: config.env.address is not None and task.kwargs):
        message = "the operator of the server chooses the arguments of its tasks (env.address)"
        yield Problem(f"{key}.kwargs", message, hint="remove it; the server has kwargs in its --tasks")
    kind = when(lambda: config.actor.model.type)
    if kind in INSTRUCTED and when(lambda: task.instruction is None):
        message = f"{_MODEL} {kind} needs an instruction for each task"
        yield Problem(f"{key}.instruction", message, hint="for example: open the drawer")
    if kind not in (None, *INSTRUCTED) and when(lambda: task.instruction is not None):
        message = f"{_MODEL} {kind} reads no instructions, only observations"
        yield Problem(f"{key}.instruction", message, hint=f"{_MODEL}: vla")


def unread(config: Config) -> Iterator[Unread]:
    """Yields the keys of `env` that this config does not read, each with the reason."""
    if when(lambda: reasoning(config)):
        yield Unread("env", "reasoning tasks have no simulation", (TASK,))
    elif when(lambda: embodied(config)):
        if when(lambda: config.env.pixels is not None):
            reason = f"images ({_PIXELS}) are divided by 255 in the model instead"
            yield from unread_keys("env", "normalize_observations clip_observations", reason, _PIXELS, TASK)
        if when(lambda: config.env.address is not None):
            reason = "the operator of the server chooses the environment (env.address)"
            yield from unread_keys("env", "backend kwargs python", reason, "env.address")
            yield Unread("env.pixels", f"{reason}, by --pixels", ("env.address",))
        else:
            yield Unread("env.token_file", "there is no server without env.address", ("env.address",))
        if when(lambda: is_named(config.env.backend)):
            reason = "env.backend is a class of yours, which is the environment"
            yield from unread_keys("env", "id pixels tasks evaluation.video", reason, "env.backend")
        if when(lambda: config.env.backend != "mujoco_warp"):
            reason = "only env.backend mujoco_warp steps environments on a device"
            yield Unread("env.on_device", reason, ("env.backend",))
        if when(lambda: not config.env.normalize_observations):
            reason = "only normalised observations are clipped, and env.normalize_observations is off"
            yield Unread("env.clip_observations", reason, ("env.normalize_observations",))
        if when(lambda: config.whole_episodes):
            reason = "loss_type actor scores episodes by their rewards as they are: a running deviation would differ"
            yield from unread_keys("env", "normalize_rewards clip_rewards", reason, "algorithm.loss_type")
        elif when(lambda: not config.env.normalize_rewards):
            reason = "only normalised rewards are clipped, and env.normalize_rewards is off"
            yield Unread("env.clip_rewards", reason, ("env.normalize_rewards",))
