"""Environments under action chunks: what is executed, what follows an end inside a chunk, bootstrap modes."""

from __future__ import annotations

import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from stand_ins import DirectRollout, context, embodied_config

from rl_platform.algorithms.advantages import advantages
from rl_platform.components.actor import EmbodiedActor
from rl_platform.components.environment import Environment
from rl_platform.components.policy_rollout import Actions, Observations, PolicyRollout, RemotePolicy
from rl_platform.config.schema import Config
from rl_platform.records import RolloutBatch
from rl_platform.rng import derive_seed

NAN = float("nan")


class Counter(gymnasium.Env):
    """Observation: [number of the episode, steps so far]; reward: steps so far + 1. Terminates after `length` steps;
    the reward of step `nan_at` of the first episode is not a number."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(50)

    def __init__(self, length: int = 3, nan_at: int = -1) -> None:
        self.length, self.nan_at, self.episode = length, nan_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps, self.taken = self.episode + 1, 0, []
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        self.taken.append(int(action))
        reward = NAN if (self.episode, self.steps) == (1, self.nan_at) else float(self.steps)
        return self._observe(), reward, self.steps == self.length, False, {}

    def _observe(self):
        return np.array([self.episode, self.steps], np.float32)


gymnasium.register("Counter-v0", Counter)


class CountsActions:
    """A policy behind the channel interface: its n-th choice is of the actions K n .. K n + K - 1."""

    def __init__(self, num_actions: int) -> None:
        self.num_actions = num_actions
        self.asked: list[Observations] = []

    def put(self, observations: Observations) -> None:
        self.asked.append(observations)

    def get(self) -> Actions:
        rows, first = len(self.asked[-1].array), self.num_actions * (len(self.asked) - 1)
        actions = np.tile(np.arange(first, first + self.num_actions), (rows, 1))
        return Actions(actions, -0.01 * actions[..., None].astype(np.float32))


def config(algorithm: dict[str, Any] | None = None, num_actions: int = 2, **env: Any) -> Config:
    settings = {"id": "Counter-v0", "num_envs": 1, "rollout_steps": 6} | env
    model = {"hidden_sizes": [8], "num_action_chunks": num_actions}
    return embodied_config(settings, model, {"normalize_advantages": False} | (algorithm or {}))


def collect(settings: Config) -> SimpleNamespace:
    policy = CountsActions(settings.actor.model.num_action_chunks)
    with closing(Environment(context("env"), settings)) as environment:
        batch, metrics = environment.collect(0, RemotePolicy(policy, policy))
        return SimpleNamespace(batch=batch, metrics=metrics, asked=policy.asked, state=environment.state_dict())


ACTIONS = {"reward_type": "action_level", "logprob_type": "action_level"}


class TestEndInsideAChunk:
    """Episodes of 3 steps, chunks of 2: the second chunk of an episode is cut after its first action."""

    def test_the_rest_of_the_chunk_is_not_executed(self) -> None:
        found = collect(config(ACTIONS))
        batch = found.batch
        assert batch.inputs["executed"].tolist() == [[[True, True], [True, False], [True, True]]]
        assert batch.inputs["actions"].tolist() == [[[0, 1], [2, 3], [4, 5]]]
        assert batch.action_mask.tolist() == [[True, True, True, False, True, True]]
        assert batch.rewards.tolist() == [[1.0, 2.0, 3.0, 0.0, 1.0, 2.0]]
        assert found.metrics["perf/env_steps"] == 5.0
        assert found.metrics["episode/count"] == 1.0
        assert found.metrics["episode/return"] == 6.0
        assert found.metrics["episode/length"] == 3.0

    def test_the_next_chunk_begins_with_the_next_episode(self) -> None:
        found = collect(config(ACTIONS))
        assert found.batch.inputs["observations"].tolist() == [[[1.0, 0.0], [1.0, 2.0], [2.0, 0.0]]]
        assert [asked.array[0].tolist() for asked in found.asked] == [[1.0, 0.0], [1.0, 2.0], [2.0, 0.0]]
        assert found.batch.end_observations[0, 1].tolist() == [1.0, 3.0]
        assert found.batch.end_observations[0, 2].tolist() == [2.0, 2.0]  # the rollout's own end

    def test_rewards_and_log_probs_of_a_chunk_are_of_what_was_executed(self) -> None:
        batch = collect(config()).batch
        assert batch.action_mask.tolist() == [[True, True, True]]
        assert batch.rewards.tolist() == [[3.0, 3.0, 3.0]]
        assert batch.rollout_log_probs[0].tolist() == pytest.approx([-0.01, -0.02, -0.09])
        assert batch.ends.tolist() == [[False, True, True]]

    def test_advantages_of_actions(self) -> None:
        """gamma = lambda = 1/2, V = 0: within the first episode 3; 2 + 3/4; 1 + 2.75/4."""
        settings = config(ACTIONS | {"gamma": 0.5, "gae_lambda": 0.5})
        batch = collect(settings).batch
        batch.values = batch.end_values = torch.zeros(1, 6)
        found, returns = advantages(batch, settings.algorithm)
        assert found.tolist() == [[1.6875, 2.75, 3.0, 0.0, 1.5, 2.0]]
        assert returns is not None
        assert returns.tolist() == found.tolist()

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_other_environments_go_on(self, num_workers: int) -> None:
        """The first of two environments is at its second episode when the other one, of 5 steps, is at its first."""
        settings = config(ACTIONS, num_envs=2, num_workers=num_workers, id="Uneven-v0")
        batch = collect(settings).batch
        assert batch.rewards.tolist() == [[1.0, 2.0, 3.0, 0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0, 0.0]]

    def test_stages_change_nothing(self) -> None:
        whole, staged = (
            collect(config(ACTIONS, num_envs=4, pipeline_stages=stages, id="Uneven-v0")) for stages in (1, 2)
        )
        for name in ("rewards", "ends", "bootstrapped", "end_observations", "action_mask"):
            assert torch.equal(getattr(whole.batch, name), getattr(staged.batch, name)), name
        assert torch.equal(whole.batch.inputs["executed"], staged.batch.inputs["executed"])

    def test_a_step_that_is_not_finite_ends_the_chunk_and_does_not_count(self) -> None:
        found = collect(config(ACTIONS, kwargs={"nan_at": 2}))
        assert found.batch.inputs["executed"][0].tolist() == [[True, False], [True, True], [True, False]]
        assert found.batch.rewards.tolist() == [[1.0, 0.0, 1.0, 2.0, 3.0, 0.0]]
        assert found.batch.bootstrapped[0].tolist() == [False, True, False, False, False, False]
        assert found.metrics["episode/invalid"] == 1.0
        assert found.metrics["perf/env_steps"] == 5.0

    def test_normalisers_count_every_step_once(self) -> None:
        settings = config(num_envs=2, normalize_observations=True, normalize_rewards=True, id="Uneven-v0")
        state = collect(settings).state
        assert state["observation_normalizer"]["count"] == 2 + 10  # two resets, five steps of each environment
        assert state["reward_normalizer"]["moments"]["count"] == 10
        seen = [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [1, 0], [1, 1], [1, 2], [1, 3], [1, 4], [2, 0]]
        assert state["observation_normalizer"]["mean"] == pytest.approx(np.mean(seen, axis=0).tolist())


FIRST_SEED = derive_seed(3, "env") % 2**31


class Uneven(Counter):
    """Every other environment has episodes of 5 steps."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.length = 3 if seed % 2 == FIRST_SEED % 2 else 5
        return super().reset(seed=seed)


gymnasium.register("Uneven-v0", Uneven)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import this module, and torch with it


class TestBootstrap:
    """Returns at gamma 1/2 and lambda 0, where every state is worth 10: r + V / 2, V being 10 or 0 after an end."""

    def returns(self, kind: str, algorithm: dict[str, Any] | None = None, **env: Any) -> list[float]:
        keys = {"gamma": 0.5, "gae_lambda": 0.0, "bootstrap_type": kind}
        settings = config(keys | (algorithm or {}), **env)
        environment = Environment(context("env"), settings)
        batch = one_rollout(environment, PolicyRollout(context("rollout"), settings, environment.envs.spaces))
        actor = EmbodiedActor(context("actor_critic"), settings, environment.envs.spaces)
        environment.close()
        torch.nn.init.constant_(actor.engine.model.model.value_head.bias, 10.0)
        for name, tensor in actor.evaluate(batch).items():
            setattr(batch, name, tensor)
        found = advantages(batch, settings.algorithm)[1]
        assert found is not None
        return found[batch.value_positions].tolist()

    @pytest.mark.parametrize(("kind", "third"), [("standard", 3.0), ("always", 8.0), ("none", 3.0)])
    def test_terminated(self, kind: str, third: float) -> None:
        """Rewards 1 2 3, the end of the episode, 1, the end of the rollout."""
        found = self.returns(kind, num_actions=1, rollout_steps=4)
        assert found == pytest.approx([6.0, 7.0, third, 6.0])

    @pytest.mark.parametrize(("kind", "second"), [("standard", 7.0), ("always", 7.0), ("none", 2.0)])
    def test_truncated(self, kind: str, second: float) -> None:
        """Rewards 1 2, the time limit, 1, the end of the rollout."""
        found = self.returns(kind, num_actions=1, rollout_steps=3, max_episode_steps=2)
        assert found == pytest.approx([6.0, second, 6.0])

    @pytest.mark.parametrize(("kind", "third"), [("standard", 3.0), ("always", 8.0), ("none", 3.0)])
    def test_terminated_inside_a_chunk(self, kind: str, third: float) -> None:
        assert self.returns(kind, ACTIONS) == pytest.approx([6.0, 7.0, third, 6.0, 7.0])

    @pytest.mark.parametrize(("kind", "second"), [("standard", 8.0), ("always", 8.0), ("none", 3.0)])
    def test_truncated_inside_a_chunk(self, kind: str, second: float) -> None:
        """Rewards 1 + 2, 3, the time limit, 1 + 2, the end of the rollout."""
        found = self.returns(kind, max_episode_steps=3, kwargs={"length": 9})
        assert found == pytest.approx([8.0, second, 8.0])


def one_rollout(environment: Environment, rollout: PolicyRollout) -> RolloutBatch:
    policy = DirectRollout(rollout)
    return environment.collect(0, RemotePolicy(policy, policy))[0]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_a_chunk_of_one_action_is_one_action(env_id: str) -> None:
    """Two of the same policy: per component, and the usual way."""
    found = {}
    env = {"id": env_id, "num_envs": 4, "rollout_steps": 30, "max_episode_steps": 11}
    env |= {"normalize_rewards": True, "normalize_observations": True}
    for level in ("chunk_level", "token_level"):
        settings = config({"entropy_type": "token_level", "logprob_type": level}, num_actions=1, **env)
        if level == "chunk_level":
            settings = config(num_actions=1, **env)
        environment = Environment(context("env"), settings)
        rollout = PolicyRollout(context("rollout"), settings, environment.envs.spaces)
        actor = EmbodiedActor(context("actor_critic"), settings, environment.envs.spaces)
        batch = one_rollout(environment, rollout)
        environment.close()
        for name, tensor in actor.evaluate(batch).items():
            setattr(batch, name, tensor)
        batch.advantages, batch.returns = advantages(batch, settings.algorithm)
        found[level] = batch.flatten()
    plain, fine = found["chunk_level"], found["token_level"]
    for name in ("log_probs", "rollout_log_probs"):
        summed = getattr(fine, name).sum(1, keepdim=True)
        torch.testing.assert_close(summed, getattr(plain, name), rtol=1e-4, atol=1e-5)
    assert fine.value_positions.sum() == plain.mask.sum()
    for name in ("rewards", "values", "returns", "advantages"):
        torch.testing.assert_close(getattr(fine, name)[:, :1], getattr(plain, name), rtol=1e-4, atol=1e-5)
    assert (fine.advantages == fine.advantages[:, :1]).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_native_environments_wait_too(num_workers: int) -> None:
    """HalfCheetah, truncated after 3 steps: the first action of the next chunk meets the state after the reset."""
    algorithm = ACTIONS | {"logprob_type": "token_level"}
    env = {"id": "HalfCheetah-v5", "num_envs": 4, "num_workers": num_workers, "max_episode_steps": 3}
    settings = config(algorithm, **env)
    environment = Environment(context("env"), settings)
    rollout = PolicyRollout(context("rollout"), settings, environment.envs.spaces)
    batch = one_rollout(environment, rollout)
    assert batch.inputs["executed"][0].tolist() == [[True, True], [True, False], [True, True]]
    assert environment.envs._buffers.lengths.tolist() == [3] * 4
    environment.close()
    # the resting pose with noise of 0.1, as after every reset, not a state that a step has led to
    assert batch.inputs["observations"][:, 2, :8].abs().max() <= 0.1
    assert batch.inputs["observations"][:, 1, :8].abs().max() > 0.1
