"""The keys of RLinf's environments and simulators in embodied runs."""

from __future__ import annotations

from rl_platform.launch.tools.convert.outcome import (
    REASONS,
    ForeignConfig,
    Named,
    Outcome,
    Rule,
    Table,
    Value,
    detail,
    lacking,
    number,
    off,
    only,
    passed,
    same,
    to,
    untranslated,
    while_,
    write,
)
from rl_platform.launch.tools.convert.rlinf_stand_ins import SIMULATOR_FILE, python_name

_MADE_BY_GYMNASIUM = (None, "maniskill", "maniskill_rlt")  # RLinf calls gymnasium.make(**init_params)
_PAY_SUCCESS = ("libero", "metaworld", "calvin")  # their only reward
_ONE_SET = "evaluation has the environments of training here"


def embodied(source: ForeignConfig) -> bool:
    """Returns whether the config trains an embodied policy."""
    return source("runner.task_type") == "embodied"


def _rollout_steps(value: Value, source: ForeignConfig) -> Outcome:
    epochs = number(source("env.train.rollout_epoch") or 1)
    why = f"{epochs} rollouts of {value} steps as one; episodes go on between them" if epochs > 1 else ""
    if epochs > 1 and value == source("env.train.max_episode_steps"):
        why = f"{epochs} rollouts of {value} steps, each a whole episode at most"
    return write({"env.rollout_steps": number(value) * epochs}, why)


def _auto_reset(value: Value, source: ForeignConfig) -> Outcome:
    if value or source("algorithm.adv_type") != "gae":
        return same("episodes restart at once with GAE; other estimators play whole episodes")
    return untranslated("an environment waits there until the rollout ends; here its next episode begins at once")


def _eval_episodes(value: Value, source: ForeignConfig) -> Outcome:
    epochs = source("env.eval.rollout_epoch") or source("algorithm.eval_rollout_epoch") or 1
    return write({"env.evaluation.episodes": number(value) * number(epochs)})


def _own_simulator(source: ForeignConfig) -> bool:
    """Returns whether RLinf steps the simulator by a class of its own, and not by gymnasium.make."""
    kind = source("env.train.env_type")
    if kind == "metaworld":
        return not _as_numbers(source)
    return kind is not None and (kind not in _MADE_BY_GYMNASIUM or source("env.train.init_params.id") is None)


def _as_numbers(source: ForeignConfig) -> bool:
    """True for Meta-World with a policy that can read numbers in place of pictures."""
    return source("env.train.env_type") == "metaworld" and not str(source("actor.model.model_type")).startswith(
        "openvla"
    )


def _env_type(value: Value, source: ForeignConfig) -> Outcome:
    if _as_numbers(source):
        why = "rl-platform environment manipulation installs it; numbers are observed, and no pictures"
        values: dict[str, Value] = {"env.id": "metaworld:Meta-World/MT1", "env.python": "manipulation"}
        return write({**values, "env.num_workers": source.whole("env.train.total_num_envs", 1)}, why)
    if not _own_simulator(source):
        why = f"put ManiSkill into the function maniskill in {SIMULATOR_FILE}; env.python: an interpreter that has it"
        return untranslated(why, {"env.id": f"{SIMULATOR_FILE}:maniskill"})
    name = python_name(str(value))
    why = f"a simulator: put it into the function {name} in {SIMULATOR_FILE}; env.python: an interpreter that has it"
    return untranslated(why, {"env.id": f"{SIMULATOR_FILE}:{name}"})


def _of_simulator(key: str, otherwise: Rule) -> Rule:
    """A setting of the simulator that has no key here: an argument of the user's function, if there is one."""
    name = key.removeprefix("env.train.").removeprefix("init_params.")

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        outcome = otherwise(value, source)
        if outcome.status != "untranslated" or not _own_simulator(source):
            return outcome
        return passed(f"env.kwargs.{name}", value, f"an argument of {source('env.train.env_type')} in {SIMULATOR_FILE}")

    return rule


def init_param(key: str) -> Rule:
    """RLinf passes `init_params` to gymnasium.make, or its class of the simulator reads them."""
    name = key.removeprefix("env.train.init_params.")

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        if source("env.train.init_params.id") is not None and not _own_simulator(source):
            return write({f"env.kwargs.{name}": value})
        return untranslated("a setting of its simulator; environments here are registered with Gymnasium")

    return _of_simulator(key, rule)


def _env_id(value: Value, source: ForeignConfig) -> Outcome:
    if _own_simulator(source):
        return passed("env.kwargs.env_id", value, f"an argument of {source('env.train.env_type')} in {SIMULATOR_FILE}")
    if source("env.train.env_type") is None:
        return to("env.id", why="it must be registered with Gymnasium")(value, source)
    return write({"env.kwargs.env_id": value}, "the id that RLinf and ManiSkill register")


def _in_evaluation(name: str, rule: Rule) -> Rule:
    """A key of the evaluation that repeats the training's says nothing new: both share their environments here."""

    def evaluated(value: Value, source: ForeignConfig) -> Outcome:
        outcome = rule(value, source)
        key = f"env.train.{name}"
        lost = outcome.status == "untranslated"
        return same("as in training") if lost and key in source.given and source(key) == value else outcome

    return evaluated


def _as_in_training(key: str) -> Rule:
    return lambda value, source: (
        same("as in training") if value is None or value == source(key) else untranslated("as in training here")
    )


def _fixed_states(value: Value, source: ForeignConfig) -> Outcome:
    if not value or number(source("algorithm.group_size") or 1) > 1:
        return same("groups begin in one state; other resets are random")
    return untranslated("resets are random")


def _rel_reward(value: Value, source: ForeignConfig) -> Outcome:
    """The difference to the reward of the step before."""
    paid_once = source("env.train.env_type") in _PAY_SUCCESS and not source("env.train.use_step_penalty")
    if value and paid_once and not source("env.train.ignore_terminations"):
        return same("a success is paid once, because it ends the episode")
    return off(REASONS["episode_reward"])(value, source)


def _reward_coef(value: Value, source: ForeignConfig) -> Outcome:
    if source("algorithm.adv_type") == "grpo":
        return same("GRPO divides rewards by their deviation within a group")
    return only(1, None, why="rewards as they are", otherwise=REASONS["episode_reward"])(value, source)


def _unless_set(why: str) -> Rule:
    return lambda value, _: same("not set") if value is None else untranslated(why)


def _suite(value: Value, source: ForeignConfig) -> Outcome:
    if _as_numbers(source):
        one: dict[str, Value] = {"env.kwargs.env_name": "reach-v3", "env.kwargs.seed": 1}
        return untranslated("env.tasks: an equal number of environments for each of its tasks", one)
    return _unless_set("a set of tasks of RLinf's environments")(value, source)


_OF_SIMULATOR: dict[str, Rule] = {
    "task_suite_name": _suite,
    "ignore_terminations": off("an episode ends where it terminates"),
    "reward_coef": _reward_coef,
    "use_rel_reward": _rel_reward,
    "use_step_penalty": off(REASONS["episode_reward"]),
    "reward_mode": only("raw", None, why="rewards as they are", otherwise=REASONS["episode_reward"]),
    "use_ordered_reset_state_ids": off("resets are random"),
}
_IN_EVALUATION: dict[str, Rule] = {
    **_OF_SIMULATOR,
    "use_fixed_reset_state_ids": detail("groups begin in one state; other resets are random"),
    "use_ordered_reset_state_ids": detail("the episodes of an evaluation have fixed seeds"),
    "video_cfg.fps": lacking("there is no key for the frame rate of videos"),
    "data_collection.*": while_(
        lambda source: bool(source("env.eval.data_collection.enabled")),
        lacking("collected episodes are not stored"),
        "data_collection.enabled is false",
    ),
    "env_type": _unless_set(_ONE_SET),
}
EMBODIED: Table = {
    "env.train.max_steps_per_rollout_epoch": _rollout_steps,
    "env.train.auto_reset": _auto_reset,
    "env.train.env_type": _env_type,
    "env.train.init_params.id": _env_id,
    "env.train.init_params.*": Named(init_param),
    "env.train.use_fixed_reset_state_ids": _of_simulator("env.train.use_fixed_reset_state_ids", _fixed_states),
    **{f"env.train.{name}": _of_simulator(f"env.train.{name}", rule) for name, rule in _OF_SIMULATOR.items()},
    "env.train.*": Named(lambda key: _of_simulator(key, _unless_set("a setting of RLinf's environments"))),
    "env.eval.total_num_envs": _eval_episodes,
    "env.eval.max_episode_steps": _as_in_training("env.train.max_episode_steps"),
    "env.eval.init_params.id": _as_in_training("env.train.init_params.id"),
    **{f"env.eval.{name}": _in_evaluation(name, rule) for name, rule in _IN_EVALUATION.items()},
    "env.eval.*": Named(lambda key: _in_evaluation(key.removeprefix("env.eval."), _unless_set(_ONE_SET))),
}
