"""`offload`: what it accepts, and who cannot leave."""

from __future__ import annotations

from typing import Any

import pytest

PLACED = "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"
FULL_IN_LOSS = "algorithm={use_kl_loss: true, kl_loss_type: full}"
FULL_IN_REWARD = "algorithm={use_kl_in_reward: true, kl_penalty: full}"
AHEAD = ["runner.max_staleness=1", "algorithm={rollout_is: {}}"]


@pytest.mark.parametrize(
    ("task", "overrides", "key", "reason"),
    [
        ("reasoning", ["actor.offload=sometimes"], "actor.offload", "true, false, auto"),
        ("reasoning", [*AHEAD, "actor.offload=true"], "actor.offload", "runner.max_staleness"),
        ("reasoning", [*AHEAD, "rollout.offload=true"], "rollout.offload", "runner.max_staleness"),
        ("reasoning", [PLACED, FULL_IN_LOSS, "reference.offload=true"], "reference.offload", "kl_loss_type full"),
        ("reasoning", [PLACED, FULL_IN_REWARD, "reference.offload=true"], "reference.offload", "kl_penalty full"),
        ("reasoning", ["reference.offload=true"], "reference.offload", "no KL term is on"),
        ("embodied", ["actor.offload=true"], "actor.offload", "small"),
        ("embodied", ["rollout.offload=true"], "rollout.offload", "small"),
        ("embodied", ["critic.offload=true"], "critic.offload", "no separate critic"),
    ],
)
def test_refused(problems: Any, task: str, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems(task, *overrides).values()
    assert problem.key.startswith(key.partition(".")[0])
    assert reason in str(problem)


@pytest.mark.parametrize("value", ["true", "false", "auto"])
def test_accepted(load: Any, value: str) -> None:
    keys = (f"{name}.offload={value}" for name in ("actor", "critic", "reference", "rollout"))
    load("reasoning", PLACED, "algorithm.use_kl_loss=true", *keys)
    load("reasoning", *AHEAD, "actor.offload=auto", "critic.offload=false")
