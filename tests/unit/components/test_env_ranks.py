"""Environments and choices shared by ranks: everyone's part, and the whole that is made of the parts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rl_platform.components.env_ranks.all_envs import AllEnvs, Peers, Shares, follow_orders, joined_states
from rl_platform.components.policy_rollout import Actions, Observations, PolicyRollout, RemotePolicy
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.records import Weights
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentContext

POLE = EnvDescription("CartPole-v1")


def test_a_rank_has_an_equal_run_of_every_stage() -> None:
    shares = Shares(num_envs=12, stages=2, ranks=3)
    assert shares.rows == [slice(0, 6), slice(6, 12)]
    assert [shares.of(rank).tolist() for rank in range(3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    with pytest.raises(ValueError, match="5 environments in 1 stages cannot be shared equally by 2 ranks"):
        Shares(5, 1, 2)


@pytest.fixture
def simulated():
    """simulated(ranks, steps): results of both stages of 8 poles, step by step, and the state they are in then."""

    def run(ranks: int, steps: int = 40, start=None):
        shares = Shares(8, stages=2, ranks=ranks)
        parts = [VectorEnv(POLE, 8 // ranks, stages=2) for _ in range(ranks)]
        for rank, part in enumerate(parts):
            if start is None:
                part.reset([100 + number for number in shares.of(rank).tolist()])
            else:
                part.load_state_dict(start, shares.of(rank))
        peers = Peers(Channel("orders", 8, 60.0), Channel("answers", 8, 60.0))
        threads = [
            threading.Thread(target=follow_orders, args=(parts[rank], rank, peers, lambda done: None))
            for rank in range(1, ranks)
        ]
        for thread in threads:
            thread.start()
        envs = AllEnvs(parts[0], shares, peers) if ranks > 1 else parts[0]  # which a single rank steps itself
        draw, found = np.random.default_rng(0), [envs.observations]
        for _ in range(steps):
            for stage, rows in enumerate(envs.rows):
                size = rows.stop - rows.start
                envs.send(draw.integers(2, size=size), stage, draw.random(size) < 0.1)
            found += [envs.receive(stage) for stage in range(2)]
        peers.orders.close()
        for thread in threads:
            thread.join()
        state = joined_states([part.state_dict() for part in parts], shares)
        for part in parts:
            part.close()
        return found, state

    return run


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_number_of_ranks_changes_no_bit(simulated, ranks: int) -> None:
    (first, *expected), whole = simulated(1)
    (first_found, *found), state = simulated(ranks)
    assert (first == first_found).all()
    assert sum(len(result.episodes) for result in expected) > 8
    for one, other in zip(expected, found, strict=True):
        for name in ("observations", "rewards", "terminated", "truncated", "invalid", "final_observations"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert one.episodes == other.episodes
    assert state == whole


def test_a_state_is_gone_on_with_by_any_number_of_ranks(simulated) -> None:
    _, halfway = simulated(2)
    expected, end = simulated(1, start=halfway)
    found, other_end = simulated(4, start=halfway)
    assert (expected[0] == found[0]).all()
    assert end == other_end


def context(rank: int, world_size: int) -> ComponentContext:
    return ComponentContext(name="rollout", rank=rank, world_size=world_size, accelerators=(), seed=3)


@pytest.mark.parametrize("space", [ActionSpace("continuous", 2), ActionSpace("discrete", 3)], ids=lambda s: s.kind)
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize(("ranks", "rows"), [(1, None), (1, 5), (3, None), (2, 3), (40, None)])
def test_a_choice_depends_neither_on_ranks_nor_on_micro_batches(space: ActionSpace, chunk: int, ranks: int, rows):
    bounds = (-1.0,) * space.size, (1.0,) * space.size
    spaces = EnvSpaces((4,), space, (space.size,), *bounds)
    observations = Observations(np.random.default_rng(0).normal(size=(37, 4)).astype(np.float32), ("act", 1))

    def chosen(ranks: int, rows: int | None) -> Actions:
        config = Config.model_validate(
            {
                "runner": {"task_type": "embodied"},
                "cluster": {"component_placement": {"actor_critic,env,rollout": "all"}},
                "algorithm": {"loss_type": "actor_critic", "rollout_micro_batch_size": rows},
                "actor": {"model": {"hidden_sizes": [8], "num_action_chunks": chunk}},
                "env": {"id": "none"},
            }
        )
        policy = RemotePolicy(Channel("observations", 64, 5.0), Channel("actions", 64, 5.0), ranks)
        policy.request(observations)
        policy.to_policy.close()
        for rank in range(ranks):
            rollout = PolicyRollout(context(rank, ranks), config, spaces)
            rollout.receive(Weights(0, rollout.policy.state_dict()))
            rollout.serve(policy.to_policy, policy.from_policy)
        return policy.actions(37)

    expected, found = chosen(1, None), chosen(ranks, rows)
    np.testing.assert_allclose(found.array, expected.array, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-6, atol=1e-6)
    assert len(np.unique(expected.array, axis=0)) > 1
