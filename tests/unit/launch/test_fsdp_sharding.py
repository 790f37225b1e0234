"""Shared tokens and adapters that a model or a placement has no place for are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.placed_config import load
from rl_platform.launch.start_checks.sharding import check_sharding, sharding_problems

pytestmark = pytest.mark.usefixtures("folder")
FOUR = "cluster.component_placement={'actor,critic': 'all:0-3', 'rollout,reward': all}"
HEADS = "actor.model.random_init.num_heads={}", "actor.model.random_init.num_kv_heads={}"


def unfit(*overrides: str) -> dict[str, Problem]:
    config, placement, _ = load("reasoning.yaml", list(overrides))
    try:
        check_sharding(config.config, placement)
    except ConfigError as error:
        return {problem.key: problem for problem in error.problems}
    return {}


def test_ranks_form_whole_groups() -> None:
    config, placement, _ = load("reasoning.yaml", [FOUR, "actor.parallel.context=3", "critic.parallel.context=2"])
    (problem,) = sharding_problems(config.config, placement)
    assert problem.key == "actor.parallel.context"
    assert "4 ranks of actor are no multiple of the 3" in problem.message


def test_a_plan_of_too_few_ranks_says_so(command) -> None:
    ended = command("--plan", "reasoning.yaml", "actor.parallel.context=2")
    assert ended.code == 2
    assert "1 ranks of actor are no multiple of the 2" in ended.err


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "fits"),
    [(4, 4, 4, True), (4, 2, 4, True), (8, 4, 2, True), (2, 2, 4, False), (16, 2, 4, True), (4, 1, 2, True)],
)
def test_ranks_divide_the_heads(heads: int, kv_heads: int, ranks: int, fits: bool) -> None:
    sizes = [text.format(number) for text, number in zip(HEADS, (heads, kv_heads), strict=True)]
    refused = unfit(FOUR, *sizes, f"actor.parallel.context={ranks}")
    assert refused.keys() == (set() if fits else {"actor.parallel.context"})
    if not fits:
        assert refused["actor.parallel.context"].allowed == "1, 2"


def test_adapters_belong_to_linear_layers() -> None:
    refused = unfit("actor.lora={target_modules: [q_proj, query]}", "critic.lora={target_modules: [norm]}")
    assert refused.keys() == {"actor.lora.target_modules", "critic.lora.target_modules"}
    assert refused["actor.lora.target_modules"].value == "query"
    assert "q_proj" in refused["actor.lora.target_modules"].allowed
    assert unfit("actor.lora={}", "critic.lora={}") == {}


def test_without_peft_the_command_names_the_extra(folder: Path, command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_platform.models.adapters.lora.importlib.util.find_spec", lambda name: None)
    ended = command("reasoning.yaml", "actor.lora={}")
    assert ended.code == 2
    assert "rl-platform[lora]" in ended.err
    assert not (folder / "out").exists()
