"""Rollouts of whole episodes (`loss_type: actor`): groups that begin alike, a row per episode, idle environments."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from dataclasses import replace

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from stand_ins import context, embodied_config

from rl_platform.algorithms.advantages import advantages
from rl_platform.components.env_ranks.all_envs import Peers
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import Actions, Observations, RemotePolicy
from rl_platform.records import RolloutBatch
from rl_platform.runtime.channel import Channel


class Lottery(gymnasium.Env):
    """Observation: [ticket of the seed, steps so far]; reward: the action. Terminates when an action is 0."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, nan_at: int = -1) -> None:
        self.nan_at = nan_at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ticket, self.steps = float(self.np_random.integers(1000)), 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        reward = np.nan if action == self.nan_at else float(action)
        return self._observe(), reward, action == 0, False, {}

    def _observe(self):
        return np.array([self.ticket, self.steps], np.float32)


gymnasium.register("Lottery-v0", Lottery)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Plays:
    """A policy behind the channel interface, which takes the next actions of a list for each environment."""

    def __init__(self, actions: list[list[int]], num_actions: int = 1, hidden: bool = False) -> None:
        self.actions, self.num_actions, self.hidden = np.array(actions), num_actions, hidden
        self.asked: list[Observations] = []
        self.column = 0

    def put(self, observations: Observations) -> None:
        self.asked.append(observations)

    def get(self) -> Actions:
        columns = slice(self.column, self.column + self.num_actions)
        self.column = columns.stop
        chosen = self.actions[:, columns]
        states = self.asked[-1].hidden_states + 1 if self.hidden else None
        if self.num_actions == 1:
            return Actions(chosen[:, 0], np.full(len(chosen), -0.5, np.float32), hidden_states=states)
        return Actions(chosen, np.full((*chosen.shape, 1), -0.5, np.float32))


def environment(rank: int = 0, ranks: int = 1, algorithm=None, model=None, **env) -> Environment:
    settings = {"id": "Lottery-v0", "num_envs": 4, "rollout_steps": 8, "max_episode_steps": 4} | env
    chosen = {"loss_type": "actor", "adv_type": "rloo", "group_size": 2} | (algorithm or {})
    config = embodied_config(settings, {"hidden_sizes": [8]} | (model or {}), chosen)
    where = context("env") if ranks == 1 else replace(context("env"), rank=rank, world_size=ranks)
    return Environment(where, config)


def collect(
    actions: list[list[int]], hidden: bool = False, num_actions: int = 1, **options
) -> tuple[RolloutBatch, dict]:
    policy = Plays(actions, num_actions, hidden)
    with closing(environment(**options)) as whole:
        return whole.collect(0, RemotePolicy(policy, policy))


# two rounds of four steps; an environment that chooses 0 rests to the end of the round
ACTIONS = [
    [1, 0, 9, 9, 2, 2, 2, 2],
    [3, 3, 3, 3, 0, 9, 9, 9],
    [5, 5, 0, 9, 4, 0, 9, 9],
    [1, 1, 1, 0, 1, 1, 0, 9],
]


def test_a_row_is_one_episode_and_the_environment_rests_after_its_end():
    batch, metrics = collect(ACTIONS)
    assert batch.rewards.tolist() == [
        [1, 0, 0, 0],
        [2, 2, 2, 2],
        [3, 3, 3, 3],
        [0, 0, 0, 0],
        [5, 5, 0, 0],
        [4, 0, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 0],
    ]
    assert batch.mask.sum(dim=1).tolist() == [2, 4, 4, 1, 3, 2, 4, 3]
    assert metrics["episode/count"] == 8
    assert metrics["perf/env_steps"] == 23
    assert len(batch.flatten()) == 32


def test_environments_of_a_group_begin_alike_and_each_group_and_round_differently():
    policy = Plays([row * 2 for row in ACTIONS])
    with closing(environment()) as whole:
        batches = [whole.collect(step, RemotePolicy(policy, policy))[0] for step in range(2)]
    tickets = torch.cat([batch.inputs["observations"][:, 0, 0] for batch in batches])
    # rows: environment by environment, two rounds each; environments 0 and 2 are a group, and so are 1 and 3
    assert batches[0].group_ids.tolist() == [0, 2, 1, 3, 0, 2, 1, 3]
    assert tickets[:4].tolist() == tickets[4:8].tolist()
    assert len(set(tickets.tolist())) == 8  # 2 groups, 2 rounds, 2 rollouts


def test_advantages_compare_the_scores_of_a_group():
    batch, _ = collect(ACTIONS)
    algorithm = embodied_config({}, {}, {"loss_type": "actor", "adv_type": "rloo", "group_size": 2}).algorithm
    estimated, returns = advantages(batch, algorithm)
    # scores: environments 0 and 2 in round one: 1 and 10, in round two: 8 and 4; 1 and 3: 12 and 3, 0 and 2.
    # A = S - S of the other: -9, 4, 9, -2, 9, -4, -9, 2
    assert returns is None
    assert estimated[:, 0].tolist() == [-9, 4, 9, -2, 9, -4, -9, 2]
    assert torch.equal(estimated != 0, batch.mask)


def test_reward_to_go_ends_with_the_episode():
    algorithm = {"adv_type": "reinforce_plus_plus", "gamma": 0.5, "group_size": 1}
    batch, _ = collect(ACTIONS, algorithm=algorithm)
    section = embodied_config({}, {}, {"loss_type": "actor"} | algorithm).algorithm
    estimated, _ = advantages(batch, section)
    # G of environment 1 in round one: 3 (1 + 1/2 + 1/4 + 1/8), ..., 3; before whitening
    to_go = torch.tensor([5.625, 5.25, 4.5, 3.0])
    row = estimated[2]
    assert torch.allclose((row - row[3]) / (row[0] - row[3]), (to_go - 3.0) / 2.625)
    assert batch.group_ids.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]  # each its own


def test_an_episode_with_an_invalid_step_does_not_count():
    batch, metrics = collect(ACTIONS, kwargs={"nan_at": 4})
    assert batch.sample_mask.tolist() == [True] * 5 + [False] + [True] * 2
    assert metrics["episode/invalid"] == 1


def test_chunks_are_executed_up_to_the_end_and_the_environment_rests_until_the_round_ends():
    batch, _ = collect(ACTIONS, num_actions=2, model={"num_action_chunks": 2})
    assert batch.inputs["executed"].flatten(1).tolist()[4] == [True, True, True, False]
    assert batch.rewards.tolist()[:5] == [[1, 0], [4, 4], [6, 6], [0, 0], [10, 0]]
    assert batch.mask.tolist()[:5] == [[True, False], [True, True], [True, True], [True, False], [True, True]]
    assert len(batch.flatten()) == 16


def test_a_recurrent_policy_begins_each_episode_without_memory():
    batch, _ = collect(ACTIONS, hidden=True, model={"type": "gru", "recurrent_size": 3, "sequence_length": 2})
    states = batch.inputs["hidden_states"][..., 0]  # one step adds 1
    assert states.shape == (8, 2)
    assert states[:, 0].tolist() == [0] * 8
    assert states[2].tolist() == [0, 2]
    assert len(batch.flatten()) == 16


def test_stages_and_ranks_change_no_number():
    plain, metrics = collect(ACTIONS)
    peers = Peers(Channel("orders", 8, 60.0), Channel("answers", 8, 60.0))
    first, second = (environment(rank, 2, num_envs=4) for rank in range(2))
    serving = threading.Thread(target=second.simulate, args=(peers,))
    serving.start()
    policy = Plays(ACTIONS)
    batch, shared = first.collect(0, RemotePolicy(policy, policy), peers)
    peers.orders.close()
    serving.join()
    for each in (first, second):
        each.close()
    assert shared == metrics
    for name in ("rewards", "group_ids", "action_mask", "ends"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert torch.equal(batch.inputs["observations"], plain.inputs["observations"])


@pytest.mark.parametrize("stages", [2])
def test_a_stage_whose_environments_all_rest_is_not_asked(stages: int):
    class Staged(Plays):
        def get(self) -> Actions:
            observations = self.asked[self.column]
            self.column += 1
            _, _, position, stage = observations.draw
            rows = slice(2 * stage, 2 * stage + 2)
            return Actions(self.actions[rows, position], np.full(2, -0.5, np.float32))

    actions = [[1, 0, 9, 9], [0, 9, 9, 9], [2, 2, 2, 2], [2, 0, 9, 9]]
    policy = Staged(actions)
    with closing(environment(rollout_steps=4, pipeline_stages=stages)) as whole:
        batch, _ = whole.collect(0, RemotePolicy(policy, policy))
    assert batch.rewards.sum(dim=1).tolist() == [1, 0, 8, 2]
    assert [observations.draw[2:] for observations in policy.asked] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 1)]
