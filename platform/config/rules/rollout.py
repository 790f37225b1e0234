"""Rules of `rollout`: sampling, multi-turn conversations, partial rollouts and engines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rl_platform.config.rules.rule import TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import AGENT_TOOLS, ENGINES, TEXT_ENVIRONMENTS, Agent
from rl_platform.errors import Problem
from rl_platform.user_code import is_named

_MULTI_TURN, _PARTIAL, _AGENT = "rollout.multi_turn", "rollout.partial_rollout", "rollout.agent"
_HOSTED = "tensor_parallel_size gpu_memory_utilization engine_args engine_env"
_TOOLS = ("calculator",)
_COLDEST = 0.01  # vLLM raises lower temperatures to it without an error
_BETWEEN_TURNS = 2  # tokens of a response that are not an observation, at least: one per turn


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `rollout`."""
    if not when(lambda: reasoning(config)):
        return
    rollout, data = config.rollout, config.data
    if unknown := when(lambda: unknown_name("rollout.backend", rollout.backend, ENGINES, "Class")):
        yield unknown
    elif when(lambda: is_named(rollout.backend)):
        yield from _user_engine(config)
    longest = when(lambda: data.max_response_length) or math.inf
    too_long = f"responses are truncated at {longest} tokens (data.max_response_length)"
    if when(lambda: (rollout.sampling.max_new_tokens or 0) > longest):
        yield Problem("rollout.sampling.max_new_tokens", too_long)
    if when(lambda: (rollout.val_sampling.max_new_tokens or 0) > longest):
        yield Problem("rollout.val_sampling.max_new_tokens", too_long)
    for name in ("sampling", "val_sampling"):
        if when(lambda: 0 < getattr(rollout, name).temperature < _COLDEST):  # noqa: B023
            message = (
                "so near 0, logits divided by it overflow and log-probs become NaN; vLLM raises it, so that training "
                "would divide by another temperature"
            )
            key = f"rollout.{name}.temperature"
            hint = f"{key}: 0 always takes the likeliest token"
            yield Problem(key, message, allowed=f"0, or at least {_COLDEST}", hint=hint)
    turns = when(lambda: rollout.multi_turn)
    if turns is not None:
        if unknown := when(lambda: unknown_name(f"{_MULTI_TURN}.tool", turns.tool, _TOOLS)):
            yield unknown
        room = longest - _BETWEEN_TURNS
        if when(lambda: turns.max_observation_tokens > room):
            message = (
                f"observations count towards data.max_response_length, {longest} tokens; after one of this length no "
                "token is left for a turn"
            )
            hint = f"at most {room}, or raise data.max_response_length" if room > 0 else "raise it"
            yield Problem(f"{_MULTI_TURN}.max_observation_tokens", message, hint=hint)
    if when(lambda: rollout.partial_rollout is not None):
        yield from _partial_rollout(config)
    if when(lambda: rollout.agent is not None):
        yield from _agent(config)
    yield from _on_update(config)
    if when(lambda: rollout.weight_transfer == "group" and (config.runner.max_staleness > 1 or config.updates_at_once)):
        message = "a process group holds no copy of older weights, which generation beside training needs"
        yield Problem("rollout.weight_transfer", message, hint="rollout.weight_transfer: memory")


def _agent(config: Config) -> Iterator[Problem]:
    rollout, off = config.rollout, f"{_AGENT}: null"
    if (agent := when(lambda: rollout.agent)) is not None:
        yield from _kind_of_agent(agent, off)
    if when(lambda: rollout.multi_turn is not None):
        message = "an agent has its own tools and decides about turns"
        yield Problem(_AGENT, message, hint=f"{off}, or {_MULTI_TURN}: null")
    if when(lambda: rollout.partial_rollout is not None):
        message = "an agent cannot be interrupted: its state is in its own process"
        yield Problem(_AGENT, message, hint=f"{off}, or {_PARTIAL}: null")
    if when(lambda: config.actor.router_replay):
        message = "each call computes its context anew, and the experts of the earlier calls are not kept"
        yield Problem("actor.router_replay", message, hint=off)
    if when(lambda: config.updates_at_once):
        yield Problem(
            "rollout.on_update",
            "the tokens of an agent have no record of their versions",
            hint="rollout.on_update: finish",
        )


def _kind_of_agent(agent: Agent, off: str) -> Iterator[Problem]:
    def given() -> list[str]:
        return [name for name in ("function", "tools", "environment") if getattr(agent, name)]

    if when(lambda: len(given()) != 1 and given() != ["tools", "environment"]):
        message = f"{' and '.join(given())} are given" if given() else "says neither function nor tools nor environment"
        hint = "for example rollout.agent: {tools: [{type: calculator}]}" if not given() else f"remove one, or {off}"
        yield Problem(_AGENT, message, allowed="function, or tools, environment or both", hint=hint)
    if (function := when(lambda: agent.function)) is not None and (
        unknown := unknown_name(f"{_AGENT}.function", function, ())
    ):
        yield unknown
    for number, tool in enumerate(when(lambda: agent.tools) or ()):
        name = when(lambda tool=tool: tool.type) or ""  # type: ignore[misc]
        if unknown := unknown_name(f"{_AGENT}.tools[{number}].type", name, AGENT_TOOLS, "Class"):
            yield unknown
    if (environment := when(lambda: agent.environment)) is not None:
        name = when(lambda: environment.type) or ""
        if unknown := unknown_name(f"{_AGENT}.environment.type", name, TEXT_ENVIRONMENTS, "Class"):
            yield unknown
        if name == "verifiers" and when(lambda: bool(agent.tools)):
            message = "an environment of verifiers has its own tools"
            yield Problem(f"{_AGENT}.tools", message, hint=f"{_AGENT}.tools: []")


def _on_update(config: Config) -> Iterator[Problem]:
    rollout, key, off = config.rollout, "rollout.on_update", "rollout.on_update: finish"
    if not when(lambda: config.updates_at_once):
        return
    if when(lambda: rollout.backend != "torch"):
        message = f"only the torch engine loads weights while it generates; rollout.backend is {rollout.backend}"
        yield Problem(key, message, hint="rollout.backend: torch, or " + off)
    if when(lambda: config.runner.deterministic):
        message = "the token from which new weights count depends on timing, so results do not repeat"
        yield Problem(key, message, hint=f"runner.deterministic: false, or {off}")
    if when(lambda: rollout.multi_turn is not None):
        yield Problem(key, "the tokens of a conversation have no record of their versions", hint=off)
    if when(lambda: rollout.partial_rollout is not None):
        yield Problem(key, "rollout.partial_rollout already continues responses with newer weights", hint=off)
    if when(lambda: config.actor.router_replay and rollout.on_update == "continue"):
        message = "a continued response computes its tokens anew with other weights, and so with other experts"
        yield Problem(key, message, hint=off)


def _user_engine(config: Config) -> Iterator[Problem]:
    message, hint = "an engine of yours (rollout.backend) does not do this", "rollout.backend: torch"
    if when(lambda: config.rollout.stop):
        yield Problem("rollout.stop", message, hint=hint)
    if when(lambda: config.actor.router_replay):
        yield Problem("actor.router_replay", message, hint=hint)


def _partial_rollout(config: Config) -> Iterator[Problem]:
    algorithm, off = config.algorithm, f"{_PARTIAL}: null"
    if when(lambda: config.prompts_in_flight <= config.data.train_batch_size):
        prompts = config.data.train_batch_size
        message = f"a step trains on {prompts} prompts (data.train_batch_size), so no response would be interrupted"
        yield Problem(f"{_PARTIAL}.prompts_in_flight", message, hint=f"more than {prompts}")
    if when(lambda: config.rollout.multi_turn is not None):
        message = "conversations cannot be interrupted: the tool would answer a part of a turn"
        yield Problem(_PARTIAL, message, hint=off)
    if when(lambda: algorithm.dynamic_sampling is not None):
        message = "dynamic sampling compares whole rounds of prompts, and an interrupted round is incomplete"
        yield Problem(_PARTIAL, message, hint=f"{off}, or algorithm.dynamic_sampling: null")
    if when(lambda: algorithm.rollout_is is None and algorithm.old_log_probs != "rollout"):
        message = "continued responses contain tokens of older weights, which need a correction"
        yield Problem(_PARTIAL, message, hint="algorithm.rollout_is: {}")


def unread(config: Config) -> Iterator[Unread]:
    """Yields the keys of `rollout` that this config does not read, each with the reason."""
    if when(lambda: embodied(config)):
        yield Unread("rollout.offload", "embodied policies are small and always stay on their device", (TASK,))
        names = f"backend sampling val_sampling multi_turn agent max_running_requests stop vllm {_HOSTED}"
        yield from unread_keys("rollout", names, "embodied policies choose actions and generate no text", TASK)
        reason = "embodied policies are small and always sent through main memory"
        yield Unread("rollout.weight_transfer", reason, (TASK,))
        yield Unread("rollout.on_update", "an embodied rollout is collected with one version of the weights", (TASK,))
        yield Unread(_PARTIAL, "embodied rollouts have equal lengths, so none is unfinished", (TASK,))
    elif when(lambda: reasoning(config)):
        if (agent := when(lambda: config.rollout.agent)) is not None:
            apart = when(lambda: agent.environment is not None and agent.environment.type == "verifiers")
            if apart:
                reason = "an environment of verifiers calls the endpoint itself"
                yield from unread_keys(
                    f"{_AGENT}.environment", "timeout_s max_result_tokens", reason, f"{_AGENT}.environment.type"
                )
            elif when(lambda: agent.environment is not None and not agent.tools):
                reason = "this text environment has no tools (rollout.agent.tools)"
                yield Unread(f"{_AGENT}.tool_format", reason, (f"{_AGENT}.environment",))
            if apart or when(lambda: agent.function is not None):
                reason = "an agent of yours or of verifiers runs in one process"
                yield Unread(
                    f"{_AGENT}.num_workers", reason, (f"{_AGENT}.environment" if apart else f"{_AGENT}.function",)
                )
        if not when(lambda: config.runner.max_staleness):
            reason = "weights change between rollouts only, as runner.max_staleness is 0"
            yield Unread("rollout.on_update", reason, ("runner.max_staleness",))
        for name in ("sampling", "val_sampling"):
            yield from _unread_if_greedy(config, name)
        if when(lambda: config.rollout.sync == "delta"):
            reason = "rollout.sync delta compares and sends weights in main memory"
            yield Unread("rollout.weight_transfer", reason, ("rollout.sync",))
        if when(lambda: is_named(config.rollout.backend)):
            reason = "an engine of yours has rollout.engine_args"
            names = "tensor_parallel_size gpu_memory_utilization engine_env weight_transfer"
            yield from unread_keys("rollout", names, reason, "rollout.backend")
        if when(lambda: config.rollout.backend == "torch"):
            yield from unread_keys("rollout", _HOSTED, "the torch engine has no such option", "rollout.backend")
        if when(lambda: config.rollout.backend != "vllm"):
            yield Unread("rollout.vllm", f"rollout.backend is {config.rollout.backend}", ("rollout.backend",))
        elif when(lambda: config.rollout.backend == "vllm"):
            reason = "vLLM runs with a torch of its own and gets weights through main memory"
            yield Unread("rollout.weight_transfer", reason, ("rollout.backend",))
    if when(lambda: config.cluster.runtime == "local"):
        reason = "cluster.runtime local is one process, in which the rollout reads the actor's weights directly"
        yield from unread_keys("rollout", "sync weight_transfer", reason, "cluster.runtime")


def _unread_if_greedy(config: Config, name: str) -> Iterator[Unread]:
    if when(lambda: getattr(config.rollout, name).temperature == 0):
        switch = f"rollout.{name}.temperature"
        yield from unread_keys(f"rollout.{name}", "top_p top_k", f"{switch} is 0: always the likeliest token", switch)
