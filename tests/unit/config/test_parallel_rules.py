"""Keys of a layout that nothing would read, and layouts that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

MEGATRON = "actor.training_backend=megatron"
CRITIC = "critic.training_backend=megatron"
INTERLEAVED = "actor.parallel={pipeline: 2, virtual_pipeline: 2}"
PLACED = "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["actor.parallel.tensor=2"], "actor.parallel", "actor.training_backend megatron"),
        (["critic.parallel={pipeline: 2}", MEGATRON], "critic.parallel", "critic.training_backend megatron"),
        ([MEGATRON, "actor.parallel.sequence=true"], "actor.parallel.sequence", "actor.parallel.tensor is 1"),
        (["actor.kernels=torch"], "actor.kernels", "only actor.training_backend megatron"),
        ([MEGATRON, "actor.parallel.virtual_pipeline=2"], "actor.parallel.virtual_pipeline", "pipeline is 1"),
        ([MEGATRON, INTERLEAVED], "actor.parallel.virtual_pipeline", "a mini-batch is one micro-batch"),
        ([MEGATRON, "actor.parallel.context=2"], "actor.parallel.context", "Transformer Engine's attention"),
        ([CRITIC, "critic.parallel.context=2"], "critic.parallel.context", "Transformer Engine's attention"),
    ],
)
def test_refused(problems: Any, overrides: list[str], key: str, reason: str) -> None:
    found = problems("reasoning", *overrides)
    (name,) = [name for name in found if name.startswith(key)]
    assert reason in found[name].message


@pytest.mark.parametrize(
    "overrides",
    [
        [MEGATRON, CRITIC],
        [MEGATRON, "actor.parallel={tensor: 2, pipeline: 2, sequence: true}"],
        [MEGATRON, INTERLEAVED, "actor.micro_batch_size=2"],
        [MEGATRON, INTERLEAVED, "actor.max_tokens_per_micro_batch=4096"],
        [MEGATRON, "actor.parallel.expert=2", "actor.kernels=transformer_engine"],
        [MEGATRON, PLACED, "algorithm={use_kl_loss: true, kl_loss_type: full}"],
        [MEGATRON, PLACED, "algorithm={use_kl_in_reward: true, kl_penalty: full}"],
    ],
)
def test_accepted(load: Any, overrides: list[str]) -> None:
    load("reasoning", *overrides)


@pytest.mark.parametrize("value", ["0", "true", "1.5"])
def test_sizes_are_counts(problems: Any, value: str) -> None:
    assert "actor.parallel.tensor" in problems("reasoning", MEGATRON, f"actor.parallel.tensor={value}")


def test_the_layout_of_a_critic_that_is_not_there_is_refused_once(problems: Any) -> None:
    without = "critic.use_critic_model=false", "cluster.component_placement={'actor,rollout,reward': all}"
    grouped = "algorithm={adv_type: grpo, group_size: 2}"
    (problem,) = problems("reasoning", *without, grouped, "critic.parallel.tensor=2").values()
    assert problem.key.startswith("critic.parallel")
    assert "no separate critic" in problem.message
