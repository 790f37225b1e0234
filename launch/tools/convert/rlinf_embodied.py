"""The keys of RLinf's embodied runs: environments, simulators and policies that this platform lacks."""

from __future__ import annotations

from rl_platform.launch.tools.convert.outcome import (
    REASONS,
    ForeignConfig,
    Named,
    Outcome,
    Rule,
    Table,
    Value,
    contained,
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

_SIMULATORS, _POLICIES = "simulators.py", "policies.py"  # files that the user writes
_MADE_BY_GYMNASIUM = (None, "maniskill", "maniskill_rlt")  # RLinf calls gymnasium.make(**init_params)
_MLP: dict[str, Value] = {"type": "mlp", "hidden_sizes": [256, 256, 256], "activation": "tanh", "initial_log_std": -0.5}
_ONLY_HERE = "RLinf reads it in embodied runs only"
_ONE_SET = "evaluation has the environments of training here"


def embodied(source: ForeignConfig) -> bool:
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


def _own_policy(source: ForeignConfig) -> bool:
    """True if the policy is a network that this platform does not have."""
    return embodied(source) and source("actor.model.model_type") not in (None, "mlp_policy")


def _class_name(kind: Value) -> str:
    if not isinstance(kind, str):
        raise TypeError
    return "".join(part[:1].upper() + part[1:] for part in kind.split("_"))


def _of_policy(key: str, otherwise: Rule) -> Rule:
    """A setting of the policy network: with a network that the user writes, an argument of its constructor."""
    name = key.removeprefix("actor.model.").removeprefix("rollout.sampling_params.").removeprefix("rollout.")

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if not _own_policy(source):
            return otherwise(value, source)
        if value is None:
            return same("not set")
        why = f"an argument of {_class_name(source('actor.model.model_type'))} in {_POLICIES}"
        return passed(f"actor.model.kwargs.{name}", value, why)

    return rule


def _sampling(key: str) -> Rule:
    """Sampling of action tokens, which only some of RLinf's vision-language-action models have."""
    neutral = {"top_k": (-1, 0), "top_p": (1, 1.0), "repetition_penalty": (1, 1.0), "add_BOS": (False,)}
    unchanged = neutral.get(key.rpartition(".")[2], ())
    argument = _of_policy(key, while_(embodied, lacking("action heads have no sampling parameters"), _ONLY_HERE))
    return lambda value, source: (
        same("off there") if embodied(source) and value in unchanged else argument(value, source)
    )


def _model_type(role: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if not embodied(source):
            return same(REASONS["architecture"])
        if value == "mlp_policy" and role == "actor":
            why = "RLinf's value network is separate; here it is a head on the same layers"
            return write({f"actor.model.{key}": each for key, each in _MLP.items()}, why)
        if role != "actor":
            return untranslated(f"{value} is another architecture: see actor.model.type")
        name = _class_name(value)
        why = f"another architecture: write it as the class {name} in {_POLICIES}"
        return untranslated(why, {"actor.model.type": f"{_POLICIES}:{name}"})

    return rule


def _model_path(value: Value, source: ForeignConfig) -> Outcome:
    if embodied(source) and source("actor.model.model_type") == "mlp_policy":
        return same("a random network") if not value else untranslated("policies start with random weights")
    return write({"actor.model.path": value}) if value else same("not set")


def _checkpointing(role: str) -> Rule:
    written = to(f"{role}.gradient_checkpointing")
    return lambda value, source: (
        untranslated("a network of yours recomputes its layers itself")
        if value and _own_policy(source)
        else written(value, source)
    )


def _own_simulator(source: ForeignConfig) -> bool:
    """True if RLinf steps the simulator by a class of its own, and not by gymnasium.make."""
    kind = source("env.train.env_type")
    return kind is not None and (kind not in _MADE_BY_GYMNASIUM or source("env.train.init_params.id") is None)


def _env_type(value: Value, source: ForeignConfig) -> Outcome:
    if not _own_simulator(source):
        return untranslated("its simulators are not part of this platform: register a single environment as env.id")
    why = f"a simulator: write the function {value} in {_SIMULATORS}, which returns one Gymnasium environment"
    return untranslated(why, {"env.id": f"{_SIMULATORS}:{value}"})


def _of_simulator(key: str, otherwise: Rule) -> Rule:
    """A setting of the simulator that has no key here: an argument of the user's function, if there is one."""
    name = key.removeprefix("env.train.").removeprefix("init_params.")

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        outcome = otherwise(value, source)
        if outcome.status != "untranslated" or not _own_simulator(source):
            return outcome
        return passed(f"env.kwargs.{name}", value, f"an argument of {source('env.train.env_type')} in {_SIMULATORS}")

    return rule


def _init_param(key: str) -> Rule:
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
        return passed("env.kwargs.id", value, f"an argument of {source('env.train.env_type')} in {_SIMULATORS}")
    return to("env.id", why="it must be registered with Gymnasium")(value, source)


def _in_evaluation(name: str, rule: Rule) -> Rule:
    """A key of the evaluation that repeats the training's says nothing new: both share their environments here."""

    def evaluated(value: Value, source: ForeignConfig) -> Outcome:
        outcome = rule(value, source)
        key = f"env.train.{name}"
        lost = outcome.status == "untranslated"
        return same("as in training") if lost and key in source.given and source(key) == value else outcome

    return evaluated


def _unless_set(why: str) -> Rule:
    return lambda value, _: same("not set") if value is None else untranslated(why)


def _as_in_training(key: str) -> Rule:
    return lambda value, source: (
        same("as in training") if value is None or value == source(key) else untranslated("as in training here")
    )


def _fixed_states(value: Value, source: ForeignConfig) -> Outcome:
    if not value or number(source("algorithm.group_size") or 1) > 1:
        return same("groups begin in one state; other resets are random")
    return untranslated("resets are random")


_OF_SIMULATOR: dict[str, Rule] = {
    "ignore_terminations": off("an episode ends where it terminates"),
    "reward_coef": only(1, None, why="rewards as they are", otherwise=REASONS["episode_reward"]),
    "use_rel_reward": off(REASONS["episode_reward"]),
    "reward_mode": only("raw", None, why="rewards as they are", otherwise=REASONS["episode_reward"]),
    "use_ordered_reset_state_ids": off("resets are random"),
}
_IN_EVALUATION: dict[str, Rule] = {
    **_OF_SIMULATOR,
    "use_fixed_reset_state_ids": detail("groups begin in one state; other resets are random"),
    "video_cfg.fps": lacking("there is no key for the frame rate of videos"),
    "data_collection.*": while_(
        lambda source: bool(source("env.eval.data_collection.enabled")),
        lacking("collected episodes are not stored"),
        "data_collection.enabled is false",
    ),
    "env_type": _unless_set(_ONE_SET),
}
_READ_FROM_MODEL = (
    "activation normalization position_embedding_type add_bias_linear attention_dropout hidden_dropout "
    "attn_implementation use_proprio image_size trust_remote_code"
)
_OF_POLICY: dict[str, Rule] = {
    "model_path": _model_path,
    "policy_setup": detail("read from the environment's spaces"),
    "hidden_dim": detail("RLinf's MLP does not read it"),
    "is_lora": contained("actor.lora"),
    "lora_rank": while_(lambda source: bool(source("actor.model.is_lora")), "actor.lora.rank", "is_lora is false"),
    "lora_path": off("adapters start at zero"),
    **dict.fromkeys(_READ_FROM_MODEL.split(), detail(REASONS["architecture"])),
}
EMBODIED: Table = {
    "env.train.max_steps_per_rollout_epoch": _rollout_steps,
    "env.train.auto_reset": _auto_reset,
    "env.train.env_type": _env_type,
    "env.train.init_params.id": _env_id,
    "env.train.init_params.*": Named(_init_param),
    "env.train.use_fixed_reset_state_ids": _of_simulator("env.train.use_fixed_reset_state_ids", _fixed_states),
    **{f"env.train.{name}": _of_simulator(f"env.train.{name}", rule) for name, rule in _OF_SIMULATOR.items()},
    "env.train.*": Named(lambda key: _of_simulator(key, _unless_set("a setting of RLinf's environments"))),
    "env.eval.total_num_envs": _eval_episodes,
    "env.eval.max_episode_steps": _as_in_training("env.train.max_episode_steps"),
    "env.eval.init_params.id": _as_in_training("env.train.init_params.id"),
    **{f"env.eval.{name}": _in_evaluation(name, rule) for name, rule in _IN_EVALUATION.items()},
    "env.eval.*": Named(lambda key: _in_evaluation(key.removeprefix("env.eval."), _unless_set(_ONE_SET))),
    "actor.model.model_type": _model_type("actor"),
    "critic.model.model_type": _model_type("critic"),
    **{f"actor.model.{name}": _of_policy(f"actor.model.{name}", rule) for name, rule in _OF_POLICY.items()},
    "actor.model.*": Named(
        lambda key: _of_policy(key, while_(embodied, lacking("a setting of its policy networks"), _ONLY_HERE))
    ),
    "actor.fsdp_config.gradient_checkpointing": _checkpointing("actor"),
    "critic.fsdp_config.gradient_checkpointing": _checkpointing("critic"),
    "rollout.sampling_params.*": Named(_sampling),
    "rollout.unnorm_key": _of_policy("rollout.unnorm_key", lacking("a setting of its policy networks")),
}
