"""Environments take turns at the tasks of a run, whoever steps them, and the policy is told which."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from stand_ins import context, embodied_config

from rl_platform.components.env_ranks.all_envs import Shares
from rl_platform.components.env_tasks import EnvTasks
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import Observations, RemotePolicy
from rl_platform.config.schema import Config
from rl_platform.config.schema.env import Env
from rl_platform.envs.embodied.success import Success


class Shown(gymnasium.Env):
    """Observes its own number."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, number: int = 0, more: int = 0) -> None:
        self.seen = np.float32([number + more])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen, {}

    def step(self, action):
        return self.seen, 0.0, False, False, {}


gymnasium.register("Shown-v0", Shown, max_episode_steps=5)
TASKS = [{"name": name, "kwargs": {"number": 10 * index}} for index, name in enumerate("abc")]


def env(**changes: Any) -> dict[str, Any]:
    return {"id": "Shown-v0", "num_envs": 12, "kwargs": {"more": 1, "number": 99}, "tasks": TASKS} | changes


def config(**changes: Any) -> Config:
    return embodied_config(env(normalize_rewards=True, **changes), {"hidden_sizes": [4]}, {})


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_environment_has_the_task_of_its_number(ranks: int, stages: int) -> None:
    seen = np.zeros(12)
    shares = Shares(12, stages, ranks)
    for rank in range(ranks):
        environment = Environment(context("env", rank, ranks), config(pipeline_stages=stages))
        seen[shares.of(rank)] = environment.envs.observations[:, 0]
        environment.close()
    assert seen.tolist() == [1, 11, 21] * 4


def test_the_policy_is_told_where_it_reads() -> None:
    section = Env.model_validate(env(), strict=False)
    told, untold = (EnvTasks(section, reads_instructions=reads) for reads in (True, False))
    assert told.read(slice(4, 8)).tolist() == [1, 2, 0, 1]
    assert told.read(slice(5)).tolist() == [0, 1, 2, 0, 1]
    assert told.inputs(2)["tasks"].tolist() == [[number % 3] * 2 for number in range(12)]
    assert untold.read(slice(4, 8)) is None
    assert untold.inputs(2) == {}
    assert [told.whole_turns(count) for count in (3, 5, 6)] == [3, 3, 6]


def test_each_task_has_the_numbers_of_its_episodes() -> None:
    tasks = EnvTasks(Env.model_validate(env()), reads_instructions=False)
    successes = [Success(True, False), None, Success(False, False), None]
    found = tasks.metrics("val", [0, 1, 3, 4], [1.0, 5.0, 2.0, 7.0], successes)
    assert found == {"val/a/return": 1.5, "val/a/success_once": 0.5, "val/a/success_at_end": 0.0, "val/b/return": 6.0}
    nobody = EnvTasks(Env.model_validate(env(tasks=[])), reads_instructions=True)
    assert nobody.metrics("val", [0], [1.0], [None]) == {}
    assert nobody.read(slice(3)) is None
    assert nobody.whole_turns(7) == 7


def test_ranks_of_the_rollout_are_told_the_tasks_of_their_rows() -> None:
    asked: dict[int, Observations] = {}

    class Keyed:
        def put(self, observations: Observations, key: int) -> None:
            asked[key] = observations

    RemotePolicy(Keyed(), Keyed(), 2).request(Observations(np.zeros((5, 1)), tasks=np.arange(5) % 3))
    assert [asked[rank].tasks.tolist() for rank in (0, 1)] == [[0, 1], [2, 0, 1]]
