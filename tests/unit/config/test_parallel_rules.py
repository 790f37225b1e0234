"""Keys of a layout that nothing would read, and layouts that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.config.schema.models import Parallel

MEGATRON = "actor.training_backend=megatron"
CRITIC = "critic.training_backend=megatron"
INTERLEAVED = "actor.parallel={pipeline: 2, virtual_pipeline: 2}"
PLACED = "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"
COMPARED = [PLACED, "algorithm.use_kl_loss=true"]
SPLIT = "actor.parallel={tensor: 2, pipeline: 2, sequence: true}"
FROZEN = "reference.training_backend=megatron"


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
        ([*COMPARED, "reference.parallel.tensor=2"], "reference.parallel", "reference.training_backend megatron"),
        ([*COMPARED, MEGATRON, "reference.parallel.sequence=true"], "reference.parallel.sequence", "tensor is 1"),
        ([*COMPARED, MEGATRON, "reference.parallel.context=2"], "reference.parallel.context", "Transformer Engine's"),
        ([*COMPARED, FROZEN, "reference.parallel.context=2"], "reference.parallel.context", "Transformer Engine's"),
        (["reference.parallel.tensor=2"], "reference", "no KL term is on"),
        ([FROZEN, "algorithm.use_kl_loss=true", "actor.lora={rank: 2}"], "reference", "without its adapters"),
    ],
)
def test_refused(problems: Any, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems("reasoning", *overrides).values()
    assert problem.key.startswith(key)
    assert reason in str(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        [MEGATRON, CRITIC],
        [MEGATRON, "actor.parallel={tensor: 2, pipeline: 2, sequence: true}"],
        [MEGATRON, INTERLEAVED, "actor.micro_batch_size=2"],
        [MEGATRON, INTERLEAVED, "actor.max_tokens_per_micro_batch=4096"],
        [MEGATRON, "actor.parallel.expert=2", "actor.kernels=transformer_engine"],
        [MEGATRON, PLACED, "algorithm={use_kl_loss: true, kl_loss_type: full}"],
        [*COMPARED, "reference.parallel.context=2"],
        [*COMPARED, FROZEN, "reference.parallel={pipeline: 2, virtual_pipeline: 2}"],
        [*COMPARED, MEGATRON, SPLIT, "reference.training_backend=fsdp"],
        [MEGATRON, PLACED, "algorithm={use_kl_in_reward: true, kl_penalty: full}"],
    ],
)
def test_accepted(load: Any, overrides: list[str]) -> None:
    load("reasoning", *overrides)


@pytest.mark.parametrize(
    ("overrides", "backend", "parallel"),
    [
        ([], "fsdp", Parallel()),
        (["actor.parallel.context=2"], "fsdp", Parallel(context=2)),
        (["actor.parallel.context=2", "reference.parallel.context=4"], "fsdp", Parallel(context=4)),
        (["actor.parallel.context=2", FROZEN], "megatron", Parallel()),
        ([MEGATRON, SPLIT], "megatron", Parallel(tensor=2, pipeline=2, sequence=True)),
        ([MEGATRON, SPLIT, "reference.parallel.tensor=4"], "megatron", Parallel(tensor=4)),
        ([MEGATRON, SPLIT, "reference.training_backend=fsdp"], "fsdp", Parallel()),
    ],
)
def test_a_reference_is_laid_out_as_the_actor_unless_it_says_otherwise(
    load: Any, overrides: list[str], backend: str, parallel: Parallel
) -> None:
    section = load("reasoning", *COMPARED, *overrides).config.reference_section
    assert (section.training_backend, section.parallel) == (backend, parallel)


def test_what_else_a_reference_has_of_the_actor(load: Any) -> None:
    trained = [f"actor.{key}" for key in ("cpu_offload=true", "micro_batch_size=2", "gradient_checkpointing=true")]
    own = "reference={model: {path: other}, offload: true}"
    config = load("reasoning", *COMPARED, *trained, "actor.lora={rank: 2}", own).config
    section = config.reference_section
    assert (section.cpu_offload, section.micro_batch_size, section.offload) == (True, 2, True)
    assert (section.lora, section.gradient_checkpointing, section.model.path) == (None, False, "other")
    moved = load("reasoning", *COMPARED, "actor.cpu_offload=true", FROZEN).config.reference_section
    assert not moved.cpu_offload  # which only fsdp has


@pytest.mark.parametrize("key", ["reference.training_backend=ray", "reference.parallel.tensor=0", "reference.optim={}"])
def test_values_and_keys_that_a_reference_does_not_have(problems: Any, key: str) -> None:
    assert key.partition("=")[0] in problems("reasoning", *COMPARED, MEGATRON, key)


@pytest.mark.parametrize("value", ["0", "true", "1.5"])
def test_sizes_are_counts(problems: Any, value: str) -> None:
    assert "actor.parallel.tensor" in problems("reasoning", MEGATRON, f"actor.parallel.tensor={value}")


def test_the_layout_of_a_critic_that_is_not_there_is_refused_once(problems: Any) -> None:
    without = "critic.use_critic_model=false", "cluster.component_placement={'actor,rollout,reward': all}"
    grouped = "algorithm={adv_type: grpo, group_size: 2}"
    (problem,) = problems("reasoning", *without, grouped, "critic.parallel.tensor=2").values()
    assert problem.key.startswith("critic.parallel")
    assert "no separate critic" in problem.message
