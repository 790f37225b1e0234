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

    def run(file: str, placement: str, output_dir: str):
        overrides = f"cluster.component_placement={placement}", "runner.max_steps=3", f"runner.output_dir={output_dir}"
        ended = command(file, *overrides)
        assert ended.code == 0, ended.err
        return final_state(output_dir, 3), logged(output_dir)

    return run


@pytest.mark.parametrize("placement", APART.values(), ids=APART)
def test_reasoning(learned, differences, placement: str):
    together, apart = learned("reasoning.yaml", TOGETHER, "together"), learned("reasoning.yaml", placement, "apart")
    assert differences(together, apart) == []


def test_embodied(learned, differences):
    together = learned("embodied.yaml", "{'actor_critic,env,rollout': all}", "together")
    apart = learned("embodied.yaml", "{env: all, actor_critic: all, rollout: all}", "apart")
    assert differences(together, apart) == []
