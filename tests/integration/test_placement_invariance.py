"""Where components sit, and how many ranks score or generate, changes no bit of what is learned."""

from __future__ import annotations

import pytest

TOGETHER = "{'actor,critic,rollout,reward': all}"
APART = {
    "separate processes": "{actor: all, critic: all, rollout: all, reward: all}",
    "pairs in another order": "{'reward,rollout': all, 'critic,actor': all}",
    "three reward ranks": "{'actor,critic,rollout': all, reward: 'all:0-2'}",
    "two rollout ranks": "{'actor,critic': all, rollout: 'all:0-1', reward: all}",
}


@pytest.fixture
def learned_in(learned):
    """learned_in(file, placement, *overrides): checkpoint and log after three steps."""
    return lambda file, placement, *more: learned(file, f"cluster.component_placement={placement}", *more, steps=3)


@pytest.mark.parametrize("placement", APART.values(), ids=APART)
def test_reasoning(learned_in, differences, placement: str):
    assert differences(learned_in("reasoning.yaml", TOGETHER), learned_in("reasoning.yaml", placement)) == []


EMBODIED_APART = {
    "separate processes": "{env: all, actor_critic: all, rollout: all}",
    "two env ranks": "{'actor_critic,rollout': all, env: 'all:0-1'}",
    "two rollout ranks": "{'actor_critic,env': all, rollout: 'all:0-1'}",
    "four env ranks, three rollout ranks": "{actor_critic: all, env: 'all:0-3', rollout: 'all:0-2'}",
}


@pytest.mark.parametrize("placement", EMBODIED_APART.values(), ids=EMBODIED_APART)
def test_embodied(learned_in, differences, placement: str):
    together = learned_in("embodied.yaml", "{'actor_critic,env,rollout': all}")
    found = differences(together, learned_in("embodied.yaml", placement))
    # rollout ranks round the log-probs of fewer rows in another way, which these metrics alone are made of
    assert [path for path in found if "/mismatch/" not in path] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("env.pipeline_stages=2",),
        ("env.num_workers=2", "env.evaluation.episodes=1"),
        ("actor.model.num_action_chunks=2", "env.max_episode_steps=9"),
        ("env.id=HalfCheetah-v5", "env.max_episode_steps=9"),
    ],
    ids=["stages", "worker processes", "action chunks", "continuous actions"],
)
def test_env_ranks(learned_in, differences, overrides: tuple[str, ...]):
    """Bit for bit: who simulates an environment is no part of what happens in it."""
    one = learned_in("embodied.yaml", "{'actor_critic,env,rollout': all}", *overrides)
    two = learned_in("embodied.yaml", "{'actor_critic,rollout': all, env: 'all:0-1'}", *overrides)
    assert differences(one, two) == []
