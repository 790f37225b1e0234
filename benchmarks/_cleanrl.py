"""Runs CleanRL's `ppo_continuous_action.py`, an unchanged file of a checkout, as a contestant of `embodied.py`.

The environments are CleanRL's own (Gymnasium, one after the other), or those of EnvPool under the same wrappers. A lap
has the steps of a rollout and the epochs after it: `Laps` ends it before the first step of each rollout.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from _common import LONG_RUN, Turns
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import TransformObservation, vector

from rl_platform.config.schema import Config

LIMIT = 10.0  # of normalised observations and rewards, in CleanRL's file


class Laps(VectorWrapper):
    """Ends a lap before the first step of each rollout."""

    def __init__(self, envs: VectorEnv, rollout_steps: int, turns: Turns, numbers: dict[str, float]) -> None:
        super().__init__(envs)
        self.rollout_steps, self.turns, self.numbers, self.steps = rollout_steps, turns, numbers, 0

    def step(self, actions: Any) -> Any:
        if self.steps % self.rollout_steps == 0:
            self.turns.next(self.numbers)
        self.steps += 1
        return super().step(actions)


def train(turns: Turns, script: Path, config: Config, numbers: dict[str, float], envpool: bool) -> None:
    """Runs `script` with the settings of `config` until the race ends; `numbers` are reported for each lap."""
    algorithm, env = config.algorithm, config.env
    rollout = env.num_envs * env.rollout_steps

    def vector_env(thunks: Sequence[Callable[[], gymnasium.Env]]) -> Laps:
        envs = envpool_env(config) if envpool else SyncVectorEnv(thunks)
        return Laps(envs, env.rollout_steps, turns, numbers)

    arguments = {
        "env-id": env.id,
        "seed": config.runner.seed,
        "total-timesteps": LONG_RUN * rollout,
        "num-envs": env.num_envs,
        "num-steps": env.rollout_steps,
        "num-minibatches": rollout // config.data.mini_batch_size,
        "update-epochs": algorithm.ppo_epochs,
        "learning-rate": config.actor.optim.lr,
        "gamma": algorithm.gamma,
        "gae-lambda": algorithm.gae_lambda,
        "clip-coef": algorithm.clip_ratio_high,
        "ent-coef": algorithm.entropy_bonus,
        "vf-coef": algorithm.value_loss_scale,
        "max-grad-norm": config.actor.optim.clip_grad,
    }
    sys.argv = [str(script), "--no-cuda", *(f"--{name}={value}" for name, value in arguments.items())]
    gymnasium.vector.SyncVectorEnv = vector_env  # type: ignore[misc, assignment]
    # the file is written for Gymnasium 0.29, in which this wrapper kept the space of the observations
    gymnasium.wrappers.TransformObservation = lambda envs, change: TransformObservation(envs, change, None)  # type: ignore
    runpy.run_path(str(script.resolve()), run_name="__main__")


def envpool_env(config: Config) -> VectorEnv:
    """Returns EnvPool's environments under the wrappers of CleanRL's file. Each wraps all of them at once."""
    import envpool

    threads = len(os.sched_getaffinity(0))
    envs: VectorEnv = envpool.make(
        config.env.id, env_type="gymnasium", num_envs=config.env.num_envs, num_threads=threads, seed=config.runner.seed
    )
    envs = vector.RecordEpisodeStatistics(envs)
    envs = vector.NormalizeObservation(vector.ClipAction(envs))
    envs = vector.TransformObservation(envs, lambda observations: np.clip(observations, -LIMIT, LIMIT))
    envs = vector.NormalizeReward(envs, gamma=config.algorithm.gamma)
    return vector.TransformReward(envs, lambda rewards: np.clip(rewards, -LIMIT, LIMIT))
