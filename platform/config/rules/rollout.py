"""Rules of `rollout`: sampling, conversations, responses that a step cuts, and the engines."""

from __future__ import annotations

from rl_platform.config.rules.rule import FUNCTION, TASK, Rule, embodied, only, reasoning
from rl_platform.config.schema import Config
from rl_platform.config.suggest import nearest

MULTI_TURN, _PARTIAL = "rollout.multi_turn", "rollout.partial_rollout"
_SGLANG = ("tensor_parallel_size", "gpu_memory_utilization", "engine_args", "engine_env")
_TOOLS = ("calculator",)
_BETWEEN_TURNS = 2  # tokens of a response that are not an observation, at least: one per turn


def _sampling_rule(name: str) -> Rule:
    def is_too_long(config: Config) -> bool:
        longest: int | None = getattr(config.rollout, name).max_new_tokens
        return longest is not None and longest > config.data.max_response_length

    return Rule(
        f"rollout.{name}.max_new_tokens",
        is_too_long,
        lambda config: f"responses are cut at data.max_response_length, {config.data.max_response_length} tokens",
        ("data.max_response_length", TASK),
    )


def _has_unknown_tool(config: Config) -> bool:
    turns = config.rollout.multi_turn
    return turns is not None and turns.tool not in _TOOLS and not FUNCTION.fullmatch(turns.tool)


def _hint_of_tool(config: Config) -> str:
    close = nearest(config.rollout.multi_turn.tool, _TOOLS) if config.rollout.multi_turn is not None else None
    return f"did you mean {close}?" if close else ""


def _longest_observation(config: Config) -> int:
    return config.data.max_response_length - _BETWEEN_TURNS


REFUSED = only(
    reasoning,
    _sampling_rule("sampling"),
    _sampling_rule("val_sampling"),
    Rule(
        f"{MULTI_TURN}.tool",
        _has_unknown_tool,
        f"neither {', '.join(_TOOLS)} nor a function written as module:function",
        hint=_hint_of_tool,
    ),
    Rule(
        f"{MULTI_TURN}.max_observation_tokens",
        lambda config: (
            (turns := config.rollout.multi_turn) is not None
            and turns.max_observation_tokens > _longest_observation(config)
        ),
        lambda config: (
            f"data.max_response_length, {config.data.max_response_length} tokens, counts observations too: after one "
            "of that length there is no room for a turn"
        ),
        ("data.max_response_length",),
        lambda config: (
            f"at most {_longest_observation(config)}, or raise data.max_response_length"
            if _longest_observation(config) > 0
            else "raise it"
        ),
    ),
    *only(
        lambda config: config.rollout.partial_rollout is not None,
        Rule(
            f"{_PARTIAL}.prompts_in_flight",
            lambda config: config.prompts_in_flight <= config.data.train_batch_size,
            lambda config: (
                f"a step trains on {config.data.train_batch_size} prompts (data.train_batch_size): without more in "
                "work none is ever cut"
            ),
            ("data.train_batch_size",),
            lambda config: f"more than {config.data.train_batch_size}",
        ),
        Rule(
            _PARTIAL,
            lambda config: config.rollout.multi_turn is not None,
            "what a tool would have answered to a turn that is cut is not known: conversations are not cut",
            (MULTI_TURN,),
            f"{_PARTIAL}: null",
        ),
        Rule(
            _PARTIAL,
            lambda config: config.algorithm.dynamic_sampling is not None,
            "dynamic sampling judges whole rounds of prompts, and of a round that is cut some are missing",
            ("algorithm.dynamic_sampling",),
            f"{_PARTIAL}: null, or algorithm.dynamic_sampling: null",
        ),
        Rule(
            _PARTIAL,
            lambda config: config.algorithm.rollout_is is None and config.algorithm.old_log_probs != "rollout",
            "responses hold tokens of older weights: without a correction they would count as new",
            ("algorithm.rollout_is", "algorithm.old_log_probs"),
            "algorithm.rollout_is: {}",
        ),
    ),
)

WITHOUT_EFFECT = (
    Rule("rollout.offload", embodied, "an embodied policy is small: it stays where it is", (TASK,)),
    *(
        Rule(f"rollout.{name}", embodied, "embodied policies choose actions and generate no text", (TASK,))
        for name in ("backend", "sampling", "val_sampling", "multi_turn", "max_running_requests", "stop", *_SGLANG)
    ),
    Rule("rollout.weight_transfer", embodied, "an embodied policy is small: it travels through main memory", (TASK,)),
    Rule(
        _PARTIAL,
        embodied,
        "the rollouts of an embodied policy have equal lengths: none is waited for",
        (TASK,),
    ),
    Rule(
        "rollout.weight_transfer",
        lambda config: reasoning(config) and config.rollout.sync == "delta",
        "with rollout.sync delta they go through main memory, where it is seen what differs",
        ("rollout.sync",),
    ),
    *(
        Rule(
            f"rollout.{name}",
            lambda config: reasoning(config) and config.rollout.backend == "torch",
            "the torch engine has no such option",
            ("rollout.backend",),
        )
        for name in _SGLANG
    ),
    *(
        Rule(
            f"rollout.{name}",
            lambda config: config.cluster.runtime == "local",
            "in one process the rollout reads the actor's weights where they are",
            ("cluster.runtime",),
        )
        for name in ("sync", "weight_transfer")
    ),
)
