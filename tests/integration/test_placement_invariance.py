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
def learned(command, final_state, logged):
    """learned(file, placement): models, optimizers and metrics after three steps."""

    def run(file: str, placement: str, output_dir: str, *more: str):
        overrides = f"cluster.component_placement={placement}", "runner.max_steps=3", f"runner.output_dir={output_dir}"
        ended = command(file, *overrides, *more)
        assert ended.code == 0, ended.err
        return final_state(output_dir, 3), logged(output_dir)

    return run


@pytest.mark.parametrize("placement", APART.values(), ids=APART)
def test_reasoning(learned, differences, placement: str):
    together, apart = learned("reasoning.yaml", TOGETHER, "together"), learned("reasoning.yaml", placement, "apart")
    assert differences(together, apart) == []


EMBODIED_APART = {
    "separate processes": "{env: all, actor_critic: all, rollout: all}",
    "two env ranks": "{'actor_critic,rollout': all, env: 'all:0-1'}",
    "two rollout ranks": "{'actor_critic,env': all, rollout: 'all:0-1'}",
    "four env ranks, three rollout ranks": "{actor_critic: all, env: 'all:0-3', rollout: 'all:0-2'}",
}


@pytest.mark.parametrize("placement", EMBODIED_APART.values(), ids=EMBODIED_APART)
def test_embodied(learned, differences, placement: str):
    together = learned("embodied.yaml", "{'actor_critic,env,rollout': all}", "together")
    found = differences(together, learned("embodied.yaml", placement, "apart"))
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
def test_env_ranks(learned, differences, overrides: tuple[str, ...]):
    """Bit for bit: who simulates an environment is no part of what happens in it."""
    one = learned("embodied.yaml", "{'actor_critic,env,rollout': all}", "one", *overrides)
    two = learned("embodied.yaml", "{'actor_critic,rollout': all, env: 'all:0-1'}", "two", *overrides)
    assert differences(one, two) == []
