"""Rules of `rollout`: sampling, conversations, responses that a step cuts, and the engines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rl_platform.config.rules.rule import TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.errors import Problem

_MULTI_TURN, _PARTIAL = "rollout.multi_turn", "rollout.partial_rollout"
_HOSTED = "tensor_parallel_size gpu_memory_utilization engine_args engine_env"
_TOOLS = ("calculator",)
_BETWEEN_TURNS = 2  # tokens of a response that are not an observation, at least: one per turn


def refused(config: Config) -> Iterator[Problem]:
    if not when(lambda: reasoning(config)):
        return
    rollout, data = config.rollout, config.data
    longest = when(lambda: data.max_response_length) or math.inf
    too_long = f"responses are cut at data.max_response_length, {longest} tokens"
    if when(lambda: (rollout.sampling.max_new_tokens or 0) > longest):
        yield Problem("rollout.sampling.max_new_tokens", too_long)
    if when(lambda: (rollout.val_sampling.max_new_tokens or 0) > longest):
        yield Problem("rollout.val_sampling.max_new_tokens", too_long)
    turns = when(lambda: rollout.multi_turn)
    if turns is not None:
        if unknown := when(lambda: unknown_name(f"{_MULTI_TURN}.tool", turns.tool, _TOOLS)):
            yield unknown
        room = longest - _BETWEEN_TURNS
        if when(lambda: turns.max_observation_tokens > room):
            message = (
                f"data.max_response_length, {longest} tokens, counts observations too: after one of that length there "
                "is no room for a turn"
            )
            hint = f"at most {room}, or raise data.max_response_length" if room > 0 else "raise it"
            yield Problem(f"{_MULTI_TURN}.max_observation_tokens", message, hint=hint)
    if when(lambda: rollout.partial_rollout is not None):
        yield from _partial_rollout(config)


def _partial_rollout(config: Config) -> Iterator[Problem]:
    algorithm, off = config.algorithm, f"{_PARTIAL}: null"
    if when(lambda: config.prompts_in_flight <= config.data.train_batch_size):
        prompts = config.data.train_batch_size
        message = f"a step trains on {prompts} prompts (data.train_batch_size): without more in work none is ever cut"
        yield Problem(f"{_PARTIAL}.prompts_in_flight", message, hint=f"more than {prompts}")
    if when(lambda: config.rollout.multi_turn is not None):
        message = "what a tool would have answered to a turn that is cut is not known: conversations are not cut"
        yield Problem(_PARTIAL, message, hint=off)
    if when(lambda: algorithm.dynamic_sampling is not None):
        message = "dynamic sampling judges whole rounds of prompts, and of a round that is cut some are missing"
        yield Problem(_PARTIAL, message, hint=f"{off}, or algorithm.dynamic_sampling: null")
    if when(lambda: algorithm.rollout_is is None and algorithm.old_log_probs != "rollout"):
        message = "responses hold tokens of older weights: without a correction they would count as new"
        yield Problem(_PARTIAL, message, hint="algorithm.rollout_is: {}")


def unread(config: Config) -> Iterator[Unread]:
    if when(lambda: embodied(config)):
        yield Unread("rollout.offload", "an embodied policy is small: it stays where it is", (TASK,))
        names = f"backend sampling val_sampling multi_turn max_running_requests stop vllm {_HOSTED}"
        yield from unread_keys("rollout", names, "embodied policies choose actions and generate no text", TASK)
        reason = "an embodied policy is small: it travels through main memory"
        yield Unread("rollout.weight_transfer", reason, (TASK,))
        yield Unread(_PARTIAL, "the rollouts of an embodied policy have equal lengths: none is waited for", (TASK,))
    elif when(lambda: reasoning(config)):
        if when(lambda: config.rollout.sync == "delta"):
            reason = "with rollout.sync delta they go through main memory, where it is seen what differs"
            yield Unread("rollout.weight_transfer", reason, ("rollout.sync",))
        if when(lambda: config.rollout.backend == "torch"):
            yield from unread_keys("rollout", _HOSTED, "the torch engine has no such option", "rollout.backend")
        if when(lambda: config.rollout.backend != "vllm"):
            yield Unread("rollout.vllm", f"the backend is {config.rollout.backend}", ("rollout.backend",))
        elif when(lambda: config.rollout.backend == "vllm"):
            reason = "vLLM has a torch of its own, so its weights go through main memory"
            yield Unread("rollout.weight_transfer", reason, ("rollout.backend",))
    if when(lambda: config.cluster.runtime == "local"):
        reason = "in one process the rollout reads the actor's weights where they are"
        yield from unread_keys("rollout", "sync weight_transfer", reason, "cluster.runtime")
