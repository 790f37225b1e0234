"""`gradient_checkpointing: auto` recomputes layers only on GPUs that cannot hold what they keep."""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.config.schema import Config
from rl_platform.engines.training import build
from rl_platform.placement.estimates.recomputation import recomputation_text, with_recomputation
from rl_platform.placement.inventory import Inventory, inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.report_text import report_text

AUTO = ("actor.gradient_checkpointing=auto", "critic.gradient_checkpointing=auto")
TOGETHER: dict[str, object] = {"actor,critic,rollout,reward": "0-7"}


def decided(config: Config) -> tuple[object, object]:
    inventory = inventory_for(config.cluster)
    resolved = with_recomputation(config, schedule(config.cluster, inventory), inventory)
    return resolved.actor.gradient_checkpointing, resolved.critic.gradient_checkpointing


def test_layers_are_recomputed_where_the_activations_do_not_fit(plans: Any) -> None:
    """The actor's micro-batches are large, or those of both learners."""
    small, large = "max_tokens_per_micro_batch=2048", "max_tokens_per_micro_batch=1000000"
    lengths = ("data.max_prompt_length=512", "data.max_response_length=512", "data.train_batch_size=2048")
    lengths = (*lengths, "data.mini_batch_size=2048", *AUTO)
    fits = plans.config(*lengths, f"actor.{small}", f"critic.{small}", placement=TOGETHER)
    assert decided(fits) == (False, False)
    apart = {"actor,rollout,reward": "0-3", "critic": "4-7"}
    one = plans.config(*lengths, f"actor.{large}", f"critic.{small}", placement=apart)
    assert decided(one) == (True, False)
    line = "actor.gradient_checkpointing true, critic.gradient_checkpointing false: from the estimate"
    assert line in report_text(plans.report(one))


def test_without_a_gpu_or_without_auto_nothing_is_decided(plans: Any) -> None:
    config = plans.config(*AUTO, placement=TOGETHER)
    machine = Inventory.declared(1, 0)
    alone = config.cluster.model_copy(update={"component_placement": {"actor,critic,rollout,reward": "all"}})
    resolved = with_recomputation(config, schedule(alone, machine), machine)
    assert resolved.actor.gradient_checkpointing is False
    assert recomputation_text(config, resolved) is not None
    given = plans.config("actor.gradient_checkpointing=true", placement=TOGETHER)
    inventory = inventory_for(given.cluster)
    assert with_recomputation(given, schedule(given.cluster, inventory), inventory) is given
    assert recomputation_text(given, given) is None


@pytest.mark.parametrize(("value", "recomputes"), [(True, True), (False, False), ("auto", False)])
def test_an_engine_recomputes_only_if_it_was_decided(
    value: object, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    given: dict[str, Any] = {}
    monkeypatch.setattr(build, "FSDPEngine", lambda *_, **options: given.update(options))
    section = build.Trainable(gradient_checkpointing=value)
    cpu = torch.device("cpu")
    build.training_engine(section, torch.nn.Embedding(2, 2), dtype=torch.float64, horizon=1, device=cpu, nominal=False)
    assert given["gradient_checkpointing"] is recomputes
