"""What only fsdp has is refused elsewhere, and adapters take the place of a reference model."""

from __future__ import annotations

from typing import Any

import pytest

MEGATRON = "actor.training_backend=megatron"
LORA = "actor.lora={rank: 4}"
KL = "algorithm.use_kl_loss=true"
PLACED = "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([MEGATRON, LORA], "actor.lora", "transformers"),
        (["critic.training_backend=megatron", "critic.lora={}"], "critic.lora", "transformers"),
        ([MEGATRON, "actor.cpu_offload=true"], "actor.cpu_offload", "FSDP2"),
        ([MEGATRON, "actor.parallel.context=2"], "actor.parallel.context", "Transformer Engine"),
        ([LORA, KL, PLACED], "cluster.component_placement", "the actor without its adapters"),
        ([LORA, KL, "reference.group_name=frozen"], "reference", "without its adapters"),
    ],
)
def test_refused(problems: Any, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems("reasoning", *overrides).values()
    assert problem.key.startswith(key)
    assert reason in str(problem)


@pytest.mark.parametrize("key", ["actor.lora={rank: 4}", "actor.cpu_offload=true", "actor.parallel.context=2"])
def test_without_effect_on_an_embodied_policy(problems: Any, key: str) -> None:
    (name,) = problems("embodied", key)
    assert name.startswith(key.partition("=")[0])


@pytest.mark.parametrize(
    "value", ["{rank: 0}", "{alpha: 0}", "{target_modules: []}", "{target_modules: q_proj}", "{dropout: 0.1}", "4"]
)
def test_values_that_cannot_be(problems: Any, value: str) -> None:
    assert any(name.startswith("actor.lora") for name in problems("reasoning", f"actor.lora={value}"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.parallel.context=2", "critic.parallel.context=4", "actor.cpu_offload=true"],
        [LORA, "critic.lora={rank: 1, alpha: 1, target_modules: [q_proj]}"],
        [MEGATRON, "critic.lora={rank: 8}"],
    ],
)
def test_accepted(load: Any, overrides: list[str]) -> None:
    load("reasoning", *overrides)


def test_adapters_need_no_model_for_the_reference(load: Any) -> None:
    config = load("reasoning", LORA, KL).config
    assert config.reference_is_base
    assert not config.has_reference
    own = load("reasoning", LORA, KL, PLACED, "reference.model={path: other}").config
    assert own.has_reference
    assert not own.reference_is_base
    assert not load("reasoning", LORA).config.reference_is_base
