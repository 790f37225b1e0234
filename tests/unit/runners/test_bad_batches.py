"""What is wrong with a rollout is said by the PPO step itself, before a model is trained on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_ins import FixedGroup, SilentReporter
from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.errors import DataError, Diverged
from rl_platform.records import RolloutBatch
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners

SHAPE = (2, 3)
NAN = float("nan")


def tensor(value: float) -> Tensor:
    """[2,3] zeros but for `value` in row 1, position 2."""
    found = torch.zeros(SHAPE)
    found[1, 2] = value
    return found


def step(fields: dict[str, Tensor] | None = None, models: dict[str, float] | None = None, **algorithm: Any) -> Any:
    found = {name: tensor((models or {}).get(name, 0.0)) for name in ("log_probs", "values", "reference_log_probs")}
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward,reference": "all"}},
        algorithm={"use_kl_in_reward": True} | algorithm,
    )
    learners: Any = Learners(
        actor=FixedGroup(log_probs=found["log_probs"]),  # type: ignore[arg-type]
        critic=FixedGroup(values=found["values"]),  # type: ignore[arg-type]
        reference=FixedGroup(reference_log_probs=found["reference_log_probs"]),  # type: ignore[arg-type]
    )
    mask = torch.ones(SHAPE, dtype=torch.bool)
    batch = RolloutBatch({}, mask, mask[:, 0], torch.arange(2), torch.ones(SHAPE), torch.zeros(SHAPE))
    try:
        return PPO(config, learners, SilentReporter()).update(replace(batch, **(fields or {})), 0)  # type: ignore[arg-type]
    finally:
        assert not learners.actor.trained_on + learners.critic.trained_on, "trained on a bad batch"


@pytest.mark.parametrize("name", ["rewards", "rollout_log_probs"])
def test_what_was_collected(name: str) -> None:
    with pytest.raises(Diverged, match=rf"first {name}\[1, 2\] = nan"):
        step({name: tensor(NAN)})


@pytest.mark.parametrize("name", ["log_probs", "values", "reference_log_probs"])
def test_what_the_models_say_is_named_and_not_the_reward_it_spoils(name: str) -> None:
    with pytest.raises(Diverged, match=rf"^{name} of the rollout are not finite, first {name}\[1, 2\] = nan"):
        step(models={name: NAN})


def test_what_the_estimator_makes_of_finite_numbers() -> None:
    with pytest.raises(Diverged, match=r"first advantages\[1, \d\] = .*algorithm.adv_type"):
        step({"rewards": tensor(3e38)}, models={"values": -3e38}, normalize_advantages=False)


@pytest.mark.usefixtures("any_shapes")
def test_rows_that_do_not_match() -> None:
    with pytest.raises(DataError, match=r"rewards of the rollout is misaligned: its shape is \[3, 3\]"):
        step({"rewards": torch.zeros(3, 3)})


def test_a_correction_deals_with_log_probs_of_the_engine_that_are_not_finite() -> None:
    """Weight 0, and counted: they reach the update."""
    with pytest.raises(AssertionError, match="trained"):
        step({"rollout_log_probs": tensor(NAN)}, rollout_is={})
