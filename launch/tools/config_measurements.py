"""Measures the steps of a config's environments and of its policy, and the lengths of its prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing

import numpy as np
import torch

from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import LocalPolicy, PolicyRollout
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.pictures.drawing import CannotDraw, with_drawing
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.envs.reasoning.prompts import build_prompts
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.device_measurements import seconds_of
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.placement.estimates.workload import optimizer_steps
from rl_platform.planner.lengths import sampled
from rl_platform.runtime.host import ComponentContext

ROUNDS, ENOUGH_S = 4, 15.0  # rollouts of an embodied policy; none begins after so many seconds
EPISODES_S = 0.03  # seconds of one round of an environment, which has to begin new episodes in it
PROMPTS = 512


def environment_seconds(config: Config) -> dict[str, float]:
    """Returns the seconds of one environment's step on one worker."""
    env = config.env
    description, count, cpu = EnvDescription.of(env), env.num_envs, torch.device("cpu")

    def start(variables: Mapping[str, str]) -> tuple[VectorEnv, np.ndarray]:
        envs = VectorEnv(description, count, env.num_workers, env.step_timeout_s, worker_variables=variables)
        return envs, envs.reset(range(count))

    try:
        envs, _ = start({}) if description.pixels is None else with_drawing(True, start)
    except CannotDraw as error:
        raise ConfigError([Problem("env.pixels", f"nothing can be drawn on this machine: {error}")]) from error
    try:
        spaces, random = envs.spaces, np.random.default_rng(0)
        shape = (count, *spaces.policy_action_shape)
        if spaces.action.kind == "continuous":  # the environments cut them at their bounds
            actions = random.uniform(-1, 1, shape).astype(np.float32)
        else:
            actions = np.zeros(shape, np.int64)
        seconds = {"step": seconds_of(lambda: envs.step(actions), cpu, EPISODES_S) / count * max(1, env.num_workers)}
    finally:
        envs.close()
    return seconds


def policy_seconds(config: Config, device: torch.device) -> dict[str, float]:
    """Returns three times in seconds: a step of all environments with the policy's actions, the log-probs of a row, and
    an optimizer step. Each is the shortest of a few rollouts. Weights are random, advantages 0."""
    accelerators = () if device.type == "cpu" else (0,)

    def context(name: str) -> ComponentContext:
        return ComponentContext(name, 0, 1, accelerators, config.runner.seed)

    all_epochs = config.changed({"algorithm.target_kl": None})
    with closing(Environment(context("env"), config)) as environment:
        spaces = environment.envs.spaces
        actor = EmbodiedActor(context("actor_critic"), all_epochs, spaces)
        rollout = PolicyRollout(context("rollout"), config, spaces)
        rollout.receive(actor.publish(0))
        rounds: list[tuple[float, float, float]] = []
        began = time.perf_counter()
        while len(rounds) < ROUNDS and time.perf_counter() - began < ENOUGH_S:
            start = time.perf_counter()
            batch = environment.collect(len(rounds), LocalPolicy(rollout))[0]
            collected = time.perf_counter()
            fields = actor.evaluate(batch)
            evaluated = time.perf_counter()
            zeros = torch.zeros_like(batch.rewards)
            actor.update(batch.with_fields(fields | {"advantages": zeros, "returns": zeros}).flatten(), len(rounds))
            rounds.append((collected - start, evaluated - collected, time.perf_counter() - evaluated))
    rows = config.env.num_envs * config.env.rollout_steps
    counts = {"collect": config.env.rollout_steps, "evaluate": rows, "update": optimizer_steps(config, "actor_critic")}
    return {name: min(times) / counts[name] for name, times in zip(counts, zip(*rounds, strict=True), strict=True)}


def prompt_lengths(config: Config) -> list[int]:
    """Returns the lengths of a sample of the training prompts."""
    few = {"train_size": min(PROMPTS, config.data.train_size)}
    questions = build_questions(config.data.model_copy(update=few), config.runner.seed).train
    chosen = questions[:: max(1, len(questions) // PROMPTS)][:PROMPTS]
    prompts = build_prompts(chosen, load_tokenizer(config.actor.model), config.data).prompts
    return list(sampled([len(prompt.token_ids) for prompt in prompts]))
