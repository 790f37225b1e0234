"""Which policies fit which observations and actions, and that a section and a seed make one policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.launch.card.run_card import policy_card
from rl_platform.launch.start_checks.policy_fit import policy_problems
from rl_platform.models.embodied_policy import build_policy
from rl_platform.models.policies.chunk_policy import ChunkPolicy
from rl_platform.models.policy import ActorCriticPolicy

DISCRETE = EnvSpaces((4,), ActionSpace("discrete", 2), ())
BOUNDED = EnvSpaces((4,), ActionSpace("continuous", 1), (1,), (-3.0,), (3.0,))
UNBOUNDED = EnvSpaces((4,), ActionSpace("continuous", 1), (1,), (float("-inf"),), (3.0,))
IMAGES = EnvSpaces((40, 48, 3), ActionSpace("continuous", 1), (1,), (-3.0,), (3.0,), 0, "uint8")
SQUASHED = {"action_distribution": "squashed"}

REFUSED = [
    (SQUASHED, DISCRETE, "actor.model.action_distribution", "categorical"),
    ({"log_std": "state"}, DISCRETE, "actor.model.log_std", "categorical"),
    ({"initial_log_std": -1.0}, DISCRETE, "actor.model.initial_log_std", "categorical"),
    (SQUASHED, UNBOUNDED, "actor.model.action_distribution", "between their bounds"),
    ({"type": "cnn"}, BOUNDED, "actor.model.type", "env.pixels"),
    ({"type": "vla"}, BOUNDED, "actor.model.type", "needs images"),
    ({"type": "cnn", "cnn": {"kernels": [20, 20, 3]}}, IMAGES, "actor.model.cnn", "40 x 48 are too small"),
]


@pytest.mark.parametrize(("model", "spaces", "key", "reason"), REFUSED)
def test_refused(model: dict[str, Any], spaces: EnvSpaces, key: str, reason: str) -> None:
    (problem,) = policy_problems(Model(**model), spaces)
    assert problem.key == key
    assert reason in str(problem)


def test_a_vla_needs_bounds_too() -> None:
    unbounded = replace(IMAGES, action_low=UNBOUNDED.action_low)
    assert [problem.key for problem in policy_problems(Model(type="vla"), unbounded)] == ["actor.model.type"]
    assert policy_problems(Model(), unbounded) == []


@pytest.mark.parametrize(
    ("model", "spaces"),
    [({}, DISCRETE), (SQUASHED | {"log_std": "state"}, BOUNDED), ({}, IMAGES), ({"type": "cnn"}, IMAGES)],
)
@pytest.mark.parametrize("num_actions", [1, 2])
def test_accepted_and_built(model: dict[str, Any], spaces: EnvSpaces, num_actions: int) -> None:
    section = Model(hidden_sizes=[8], **model)
    assert policy_problems(section, spaces) == []
    levels = ActionLevels(num_actions, spaces.action.size if spaces.action.kind == "continuous" else 1)
    torch.manual_seed(0)
    policy = build_policy(section, spaces, levels, seed=1)
    assert type(policy) is (ActorCriticPolicy if num_actions == 1 else ChunkPolicy)
    assert (policy.encoder is not None) == (section.type == "cnn")
    dtype = torch.uint8 if spaces.images else torch.float32
    actions, _ = policy.act(torch.ones(3, spaces.observation_size, dtype=dtype))
    assert policy.executed(actions).shape == actions.shape


def test_the_card_tells_what_is_not_as_usual() -> None:
    assert policy_card(Model(), 16) == policy_card(Model(type="cnn"), 16) == []
    told = dict(policy_card(Model(action_distribution="squashed", log_std="state"), 16))
    assert "estimated by quadrature" in told["actions inside bounds"]
    assert "function of the state" in told["deviations"]
    assert "frozen" in dict(policy_card(Model(type="vla", train_backbone=False), 16))["vision-language-action"]
    assert "first 3 layers" in dict(policy_card(Model(type="vla", backbone_layers=3), 16))["vision-language-action"]
