"""Values that the config derives from several keys."""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.config.schema.models import Parallel

REFERENCE = "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"
COMPARED = [REFERENCE, "algorithm.use_kl_loss=true"]
LORA = "actor.lora={rank: 4}"
MEGATRON = "actor.training_backend=megatron"
SPLIT = "actor.parallel={tensor: 2, pipeline: 2, sequence: true}"
FROZEN = "reference.training_backend=megatron"


def test_transitions_are_choices(load: Any) -> None:
    assert load("embodied").config.rows_per_step == 8 * 128
    assert load("embodied", "actor.model.num_action_chunks=4").config.rows_per_step == 8 * 32


def test_sequences_are_rollouts_unless_they_are_cut(load: Any) -> None:
    gru = "data.mini_batch_size=128", "actor.model.type=gru"
    assert load("embodied").config.sequence_length == 1
    assert load("embodied", *gru).config.sequence_length == 128
    assert load("embodied", *gru, "actor.model.sequence_length=32").config.sequence_length == 32


def test_half_as_many_prompts_again_are_in_work(load: Any) -> None:
    partial = "rollout.partial_rollout={}", "algorithm.rollout_is={}"
    assert load("reasoning").config.prompts_in_flight == 64
    assert load("reasoning", *partial).config.prompts_in_flight == 96
    assert (
        load("reasoning", *partial, "data.train_batch_size=3", "data.mini_batch_size=3").config.prompts_in_flight == 5
    )
    assert load("reasoning", *partial, "rollout.partial_rollout.prompts_in_flight=70").config.prompts_in_flight == 70
    assert not load("reasoning", partial[0], "algorithm.old_log_probs=rollout").notes


def test_adapters_need_no_model_for_the_reference(load: Any) -> None:
    config = load("reasoning", LORA, COMPARED[1]).config
    assert config.reference_is_base
    assert not config.has_reference
    own = load("reasoning", LORA, *COMPARED, "reference.model={path: other}").config
    assert own.has_reference
    assert not own.reference_is_base
    assert not load("reasoning", LORA).config.reference_is_base


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
def test_a_reference_is_laid_out_as_the_actor_unless_its_section_differs(
    load: Any, overrides: list[str], backend: str, parallel: Parallel
) -> None:
    section = load("reasoning", *COMPARED, *overrides).config.reference_section
    assert (section.training_backend, section.parallel) == (backend, parallel)


def test_other_keys_that_a_reference_takes_from_the_actor(load: Any) -> None:
    trained = [f"actor.{key}" for key in ("cpu_offload=true", "micro_batch_size=2", "gradient_checkpointing=true")]
    own = "reference={model: {path: other}, offload: true}"
    section = load("reasoning", *COMPARED, *trained, LORA, own).config.reference_section
    assert (section.cpu_offload, section.micro_batch_size, section.offload) == (True, 2, True)
    assert (section.lora, section.gradient_checkpointing, section.model.path) == (None, False, "other")
    moved = load("reasoning", *COMPARED, "actor.cpu_offload=true", FROZEN).config.reference_section
    assert not moved.cpu_offload  # FSDP alone offloads to the CPU
