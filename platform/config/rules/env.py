"""Rules of `env`: the simulation, its processes and its tasks.

Properties of the environment itself, such as its spaces, are checked when it is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules.rule import CHUNKS, TASK, Rule, embodied, only, reasoning
from rl_platform.config.schema import Config

MODEL, PIXELS, TASKS = "actor.model.type", "env.pixels", "env.tasks"
_WARP = "MuJoCo Warp steps all environments of one task at once, and draws no pictures"


def _is_vla(config: Config) -> bool:
    return config.actor.model.type == "vla"


def _rules_of_task(index: int) -> tuple[Rule, ...]:
    """The rules of one entry of `env.tasks`."""
    path = f"{TASKS}[{index}]"
    return (
        Rule(
            f"{path}.name",
            lambda config: config.env.tasks[index].name in (task.name for task in config.env.tasks[:index]),
            lambda config: f"there is a task {config.env.tasks[index].name} already: metrics are named by it",
            (TASK,),
        ),
        Rule(
            f"{path}.instruction",
            lambda config: config.env.tasks[index].instruction is not None and not _is_vla(config),
            lambda config: (
                f"{MODEL} {config.actor.model.type} reads no instruction: it knows of tasks what it observes"
            ),
            (MODEL, TASK),
            f"{MODEL}: vla",
        ),
        Rule(
            f"{path}.instruction",
            lambda config: config.env.tasks[index].instruction is None and _is_vla(config),
            f"{MODEL} vla reads the instruction of each task",
            (MODEL, TASK),
            "as: open the drawer",
        ),
    )


def entry_rules(config: Config) -> Iterator[Rule]:
    """The rules of each entry of `env.tasks`."""
    for index in range(len(config.env.tasks)):
        yield from only(embodied, *_rules_of_task(index))


def _stages_rule(name: str) -> Rule:
    return Rule(
        "env.pipeline_stages",
        lambda config: getattr(config.env, name) % config.env.pipeline_stages,
        lambda config: f"these stages cannot share the {getattr(config.env, name)} of env.{name} equally",
        (f"env.{name}", TASK),
    )


_PROCESS_RULES = only(
    lambda config: config.env.backend == "mujoco",
    Rule(
        "env.num_workers",
        lambda config: config.env.num_workers > config.env.num_envs,
        lambda config: f"more processes than environments: env.num_envs is {config.env.num_envs}",
        ("env.num_envs", TASK),
    ),
    Rule(
        "env.num_workers",
        lambda config: (
            0 < config.env.num_workers <= config.env.num_envs and config.env.num_envs % config.env.num_workers
        ),
        lambda config: f"{config.env.num_envs} environments (env.num_envs) cannot be shared equally by these processes",
        ("env.num_envs", TASK),
    ),
    Rule(
        "env.num_workers",
        lambda config: config.env.pixels is not None and config.env.num_workers == 0,
        f"{PIXELS} are drawn in processes of their own: a graphics library that crashes cannot end the run",
        (PIXELS, TASK),
        "env.num_workers: 2, about one per core",
    ),
)

REFUSED = only(
    embodied,
    Rule(
        "env.id",
        lambda config: not config.env.id,
        "embodied training needs an environment",
        (TASK,),
        "as CartPole-v1",
    ),
    _stages_rule("num_envs"),
    _stages_rule("num_workers"),
    Rule(
        "env.rollout_steps",
        lambda config: config.env.rollout_steps % config.actor.model.num_action_chunks,
        lambda config: (
            f"chunks of {config.actor.model.num_action_chunks} actions ({CHUNKS}) do not divide it, and a rollout ends "
            "where a chunk does"
        ),
        (CHUNKS, TASK),
    ),
    *_PROCESS_RULES,
    Rule(
        "env.num_envs",
        lambda config: config.env.tasks and config.env.num_envs % len(config.env.tasks),
        lambda config: (
            f"{len(config.env.tasks)} tasks (env.tasks) cannot share {config.env.num_envs} environments evenly"
        ),
        (TASKS, TASK),
        lambda config: f"a multiple of {len(config.env.tasks)}",
    ),
    Rule(
        "env.evaluation.episodes",
        lambda config: config.env.tasks and config.env.evaluation.episodes % len(config.env.tasks),
        lambda config: (
            f"{len(config.env.tasks)} tasks (env.tasks) cannot have an equal number of "
            f"{config.env.evaluation.episodes} episodes"
        ),
        (TASKS, TASK),
        lambda config: f"a multiple of {len(config.env.tasks)}",
    ),
    *only(
        lambda config: config.env.backend == "mujoco_warp",
        Rule(
            "env.num_workers",
            lambda config: config.env.num_workers,
            _WARP,
            ("env.backend", TASK),
            "env.backend: mujoco",
        ),
        Rule(PIXELS, lambda config: config.env.pixels, _WARP, ("env.backend", TASK), "env.backend: mujoco"),
        Rule(TASKS, lambda config: config.env.tasks, _WARP, ("env.backend", TASK), "env.backend: mujoco"),
    ),
)

WITHOUT_EFFECT = (
    Rule("env", reasoning, "reasoning tasks have no simulation", (TASK,)),
    *only(
        embodied,
        *(
            Rule(
                f"env.{name}",
                lambda config: config.env.pixels is not None,
                f"pictures ({PIXELS}) are divided by 255 in the model instead",
                (PIXELS, TASK),
            )
            for name in ("normalize_observations", "clip_observations")
        ),
        Rule(
            "env.clip_observations",
            lambda config: not config.env.normalize_observations,
            "only normalised observations are clipped, and env.normalize_observations is off",
            ("env.normalize_observations",),
        ),
        Rule(
            "env.clip_rewards",
            lambda config: not config.env.normalize_rewards,
            "only normalised rewards are clipped, and env.normalize_rewards is off",
            ("env.normalize_rewards",),
        ),
    ),
)
