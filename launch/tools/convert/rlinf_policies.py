"""The keys of RLinf's policy networks in embodied runs: MLP, pi0, OpenVLA, and networks that this platform lacks."""

from __future__ import annotations

from rl_platform.launch.tools.convert.outcome import (
    REASONS,
    ForeignConfig,
    Named,
    Outcome,
    Rule,
    Scalar,
    Table,
    Value,
    choice,
    contained,
    detail,
    lacking,
    number,
    off,
    only,
    part_of,
    passed,
    same,
    to,
    untranslated,
    while_,
    write,
)
from rl_platform.launch.tools.convert.rlinf_embodied import embodied, init_param
from rl_platform.launch.tools.convert.rlinf_stand_ins import POLICY_FILE, python_name

_KIND, _IS_LORA = "actor.model.model_type", "actor.model.is_lora"
_MLP: dict[str, Value] = {"type": "mlp", "hidden_sizes": [256, 256, 256], "activation": "tanh", "initial_log_std": -0.5}
_INSTRUCTION = "Do the task."
_BINS = 256  # of OpenVLA
_VLAS = {
    **dict.fromkeys(("openpi", "openpi_rlinf", "dexbotic_pi"), "pi0"),
    **dict.fromkeys(("openvla", "openvla_oft"), "vlm_tokens"),
}
_ONLY_HERE = "RLinf reads it in embodied runs only"
_NOT: dict[Scalar, Scalar] = {True: False, False: True}
_PI0 = ("openpi", "dexbotic")  # sections with its settings
_CONTROL_MODES = {  # RLinf's choice for ManiSkill
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
    "panda_wristcam": "pd_ee_body_target_delta_pose_real_root_frame",
    "widowx_bridge": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
}


def _vla(source: ForeignConfig) -> str | None:
    """Returns the policy here that is, or comes nearest to, the vision-language-action model of a config."""
    return _VLAS.get(str(source(_KIND))) if embodied(source) else None


def _other_network(source: ForeignConfig) -> str:
    """Returns why the weights of a vision-language-action model do not load here; empty if they do."""
    if _vla(source) == "vlm_tokens":
        return "transformers does not have OpenVLA's network: another vision-language model with its bins"
    if str(source("actor.model.openpi.config_name")).startswith("pi05"):
        return "transformers does not have pi0.5: pi0 is the nearest"
    return ""


def constant_entropy(source: ForeignConfig) -> bool:
    """True for a policy that denoises with noise that it does not learn."""
    methods = (source(f"actor.model.{kind}.noise_method") for kind in _PI0)
    return _vla(source) == "pi0" and "flow_noise" not in methods


def _own(source: ForeignConfig) -> bool:
    """Returns whether the policy is a network that this platform does not have."""
    return embodied(source) and source(_KIND) not in (None, "mlp_policy", *_VLAS)


def _class_name(kind: Value) -> str:
    if not isinstance(kind, str):
        raise TypeError
    return python_name("".join(part[:1].upper() + part[1:] for part in kind.split("_")))


def _model_type(role: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if not embodied(source):
            return same(REASONS["architecture"])
        if role != "actor":
            return untranslated(f"{value} is another architecture: see actor.model.type")
        if value == "mlp_policy":
            why = "RLinf's value network is separate; here it is a head on the same layers"
            return write({f"actor.model.{key}": each for key, each in _MLP.items()}, why)
        if kind := _vla(source):
            instruction = source("env.train.init_params.task_description") or _INSTRUCTION
            values: dict[str, Value] = {"actor.model.type": kind, "actor.model.instruction": instruction}
            if kind == "vlm_tokens":
                values["actor.model.action_bins"] = _BINS
            if why := _other_network(source):
                return untranslated(why, values)
            return write(
                values, "the simulator names the task there: write it into actor.model.instruction or env.tasks"
            )
        name = _class_name(value)
        why = f"another architecture: put it into the class {name} in {POLICY_FILE}"
        return untranslated(why, {"actor.model.type": f"{POLICY_FILE}:{name}"})

    return rule


def _model_path(value: Value, source: ForeignConfig) -> Outcome:
    if embodied(source) and source(_KIND) == "mlp_policy":
        return same("a random network") if not value else untranslated("policies start with random weights")
    if not value:
        return same("not set")
    written: dict[str, Value] = {"actor.model.path": value}
    if why := _other_network(source):
        return untranslated(why, written)
    return write(written, "a folder of transformers" if _vla(source) else "")


def _of_policy(key: str, otherwise: Rule) -> Rule:
    """A setting of the policy network: with a network that the user writes, an argument of its constructor."""
    name = key.removeprefix("actor.model.").removeprefix("rollout.sampling_params.")

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if not _own(source):
            return otherwise(value, source)
        if value is None:
            return same("not set")
        return passed(
            f"actor.model.kwargs.{name}", value, f"an argument of {_class_name(source(_KIND))} in {POLICY_FILE}"
        )

    return rule


def _sampling(key: str) -> Rule:
    """Sampling of action tokens, which only some of RLinf's vision-language-action models have."""
    neutral = {"top_k": (-1, 0), "top_p": (1, 1.0), "repetition_penalty": (1, 1.0), "add_BOS": (False,)}
    unchanged = neutral.get(key.rpartition(".")[2], ())
    otherwise = "action tokens are sampled from all bins at temperature 1"
    argument = _of_policy(key, while_(embodied, lacking(otherwise), _ONLY_HERE))
    return lambda value, source: (
        same("off there") if embodied(source) and value in unchanged else argument(value, source)
    )


def _evaluation_temperature(value: Value, _: ForeignConfig) -> Outcome:
    if number(value) <= 0:
        return write({"env.evaluation.deterministic": True})
    sampled: dict[str, Value] = {"env.evaluation.deterministic": False}
    return write(sampled) if value == 1 else untranslated("actions are sampled at temperature 1", sampled)


def _checkpointing(role: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value and _own(source):
            return untranslated("a network of yours recomputes its layers itself")
        if value and _vla(source) == "pi0":
            return untranslated("pi0 cannot recompute its layers; see actor.micro_batch_size")
        return write({f"{role}.gradient_checkpointing": value})

    return rule


def _sets_control_mode(source: ForeignConfig) -> bool:
    """RLinf overrides the control mode of ManiSkill's tasks by that of the policy."""
    return source("env.train.env_type") == "maniskill" and source("actor.model.policy_setup") is not None


def _policy_setup(value: Value, source: ForeignConfig) -> Outcome:
    if not _sets_control_mode(source):
        return _of_policy("actor.model.policy_setup", detail("RLinf reads it for ManiSkill only"))(value, source)
    return choice("env.kwargs.control_mode", _CONTROL_MODES, "the control mode that RLinf chooses")(value, source)


def _value_type(value: Value, source: ForeignConfig) -> Outcome:
    if not source("actor.model.add_value_head") or value == source("algorithm.reward_type"):
        return same("as many values as algorithm.reward_type has rewards")
    return untranslated("algorithm.reward_type says how many values there are")


def _flow(kind: str) -> Table:
    """Settings of pi0, in the section of openpi or dexbotic."""

    def noise_level(value: Value, source: ForeignConfig) -> Outcome:
        if source(f"actor.model.{kind}.noise_method") == "flow_noise":
            return same("flow_noise learns its deviation")
        return write({"actor.model.flow.noise_level": value})

    def joint(value: Value, _: ForeignConfig) -> Outcome:
        if not value:
            return write({"actor.model.flow.stochastic_steps": "one"})
        return untranslated(
            "the mean over all steps there, their sum here", {"actor.model.flow.stochastic_steps": "all"}
        )

    def detached(value: Value, source: ForeignConfig) -> Outcome:
        trains, after = (source(f"actor.model.{kind}.{name}") for name in ("train_expert_only", "value_after_vlm"))
        if value is None or (trains and (value or after)):
            return same("the value reads the frozen vision-language model")
        return untranslated("the value reads the vision-language model, and its gradient reaches what is trained of it")

    key, section = f"actor.model.{kind}", "actor.model.flow"
    after = "the value reads the vision-language model and not the action expert"
    table: dict[str, Rule] = {
        "num_steps": to(f"{section}.denoising_steps"),
        "noise_method": choice(f"{section}.method", {name: name for name in ("flow_sde", "flow_cps", "flow_noise")}),
        "noise_level": noise_level,
        "joint_logprob": joint,
        "train_expert_only": choice("actor.model.train_backbone", _NOT),
        "detach_critic_input": detached,
        "value_after_vlm": only(True, None, why="the value reads the vision-language model", otherwise=after),
        "value_vlm_mode": only("mean_token", None, why="the mean of its states", otherwise="the mean of its states"),
        "action_chunk": contained("actor.model.num_action_chunks"),
        "add_value_head": contained("algorithm.loss_type"),
        "config_name": lacking("its transforms of a data set: the environment gives observations, unnorm_key a scale"),
        "max_token_len": detail("instructions are padded to the longest"),
        "chunk_critic_input": off("the value reads the vision-language model"),
        "safe_get_logprob": off("log-probs are Gaussian"),
        "noise_anneal": off("the noise is constant"),
        "noise_params": _while(f"{key}.noise_anneal", lacking("the noise is constant")),
        "dsrl_*": _while(f"{key}.use_dsrl", lacking("PPO and its relatives only")),
        **dict.fromkeys(("ignore_last", "double_layer"), off("a random step of all draws noise")),
        **dict.fromkeys(("use_dsrl", "is_nft", "use_rlt"), off("PPO and its relatives only")),
        **dict.fromkeys(("action_env_dim", "num_images_in_input"), detail("read from the environment's spaces")),
        **dict.fromkeys(
            ("action_horizon", "model_action_dim", "paligemma_variant", "action_expert_variant"),
            detail(REASONS["architecture"]),
        ),
    }
    return {f"{key}.{name}": _of_policy(f"{key}.{name}", rule) for name, rule in table.items()}


def _while(switch: str, rule: Rule) -> Rule:
    """Applies `rule` while the key `switch` is true."""
    return while_(lambda source: bool(source(switch)), rule, f"{switch.rpartition('.')[2]} is false")


_READ_FROM_MODEL = (
    "activation normalization position_embedding_type add_bias_linear add_qkv_bias attention_dropout hidden_dropout "
    "image_size vocab_size hidden_size"
)
_OF_POLICY: dict[str, Rule] = {
    "model_path": _model_path,
    "hidden_dim": detail("RLinf's MLP does not read it"),
    "lora_path": off("adapters start at zero"),
    "use_proprio": off("images or the state of the robot are observed, not both"),
    "unnorm_key": to("actor.model.unnorm_key"),
    "center_crop": off("images are resized whole"),
    "use_film": off("the instruction does not modulate the vision tower"),
    "value_type": _value_type,
    "max_prompt_length": detail("instructions are padded to the longest"),
    "num_images_in_input": detail("each image of an observation is a camera"),
    "implement_version": detail("which code its folder has"),
    "proprio_dim": _while("actor.model.use_proprio", lacking("see use_proprio")),
    "num_steps": contained("actor.model.flow.denoising_steps"),
    "lora_rank": _while(_IS_LORA, to("actor.lora.rank", "actor.lora.alpha")),
    **dict.fromkeys(_READ_FROM_MODEL.split(), detail(REASONS["architecture"])),
}
_OF_ROLLOUT: dict[str, Rule] = {
    "temperature_train": only(1, why="the temperature is 1", otherwise="actions are sampled at temperature 1"),
    "temperature_eval": _evaluation_temperature,
    "max_new_tokens": detail("a token per number of the action"),
}
POLICIES: Table = {
    _KIND: _model_type("actor"),
    "critic.model.model_type": _model_type("critic"),
    _IS_LORA: lambda value, _: part_of("actor.lora") if value else same("off there"),
    "actor.model.policy_setup": _policy_setup,
    "env.train.init_params.control_mode": lambda value, source: (
        same("actor.model.policy_setup decides")
        if _sets_control_mode(source)
        else init_param("env.train.init_params.control_mode")(value, source)
    ),
    "actor.model.trust_remote_code": detail(REASONS["trusted"]),
    "actor.model.attn_implementation": detail(REASONS["engine"]),
    **{f"actor.model.{name}": _of_policy(f"actor.model.{name}", rule) for name, rule in _OF_POLICY.items()},
    **{key: rule for kind in _PI0 for key, rule in _flow(kind).items()},
    "actor.model.*": Named(
        lambda key: _of_policy(key, while_(embodied, lacking("a setting of its policy networks"), _ONLY_HERE))
    ),
    "actor.fsdp_config.gradient_checkpointing": _checkpointing("actor"),
    "critic.fsdp_config.gradient_checkpointing": _checkpointing("critic"),
    **{
        f"rollout.sampling_params.{name}": _of_policy(
            f"rollout.sampling_params.{name}", while_(embodied, rule, _ONLY_HERE)
        )
        for name, rule in _OF_ROLLOUT.items()
    },
    "rollout.sampling_params.*": Named(_sampling),
}
