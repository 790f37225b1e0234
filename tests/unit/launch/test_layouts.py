"""Layouts that cannot be are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.cli import load
from rl_platform.launch.layouts import check_layouts, layout_problems

pytestmark = pytest.mark.usefixtures("folder")
MEGATRON = ("actor.training_backend=megatron", "critic.training_backend=megatron")
FOUR = "cluster.component_placement={'actor,critic': 'all:0-3', 'rollout,reward': all}"
APART = "cluster.component_placement={actor: 'all:0-3', critic: 'all:0-3', 'rollout,reward': all}"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def problems(*overrides: str) -> dict[str, Problem]:
    config, placement, _ = load("reasoning.yaml", [*MEGATRON, *overrides])
    return {problem.key: problem for problem in layout_problems(config.config, placement)}


def test_ranks_hold_whole_copies():
    assert problems(FOUR, "actor.parallel.tensor=2", "critic.parallel.tensor=2") == {}
    found = problems(FOUR, "actor.parallel.tensor=3", "critic.parallel.tensor=3")
    assert found.keys() == {"actor.parallel", "critic.parallel"}
    assert "4 ranks of actor" in found["actor.parallel"].message
    assert "3 ranks share" in found["actor.parallel"].message


def test_models_of_one_process_have_one_layout():
    found = problems(FOUR, "actor.parallel.tensor=2")
    assert found.keys() == {"critic.parallel"}
    assert "that of the actor is tensor 2, pipeline 1" in found["critic.parallel"].message
    assert problems(APART, "actor.parallel.tensor=2") == {}
    assert problems(FOUR, "actor.parallel={tensor: 2, sequence: true}", "critic.parallel.tensor=2") == {}


def test_a_model_on_the_cpu_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch):
    assert problems() == {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert problems("cluster.gpus_per_node=0").keys() == {"actor.training_backend", "critic.training_backend"}
    assert problems("cluster.gpus_per_node=1") == {}


def test_every_model_is_asked_whether_it_fits():
    config, placement, _ = load(
        "reasoning.yaml", [*MEGATRON, FOUR, "actor.parallel.tensor=4", "critic.parallel.pipeline=4"]
    )
    with pytest.raises(ConfigError) as caught:
        check_layouts(config.config, placement)
    assert [problem.key for problem in caught.value.problems] == ["actor.parallel.tensor", "critic.parallel.pipeline"]


def test_plain_torch_takes_any_model():
    config, placement, _ = load("reasoning.yaml", [FOUR])
    check_layouts(config.config, placement)


def test_the_command_says_it(folder: Path, command):
    override = "actor.model.random_init.num_heads=1"
    ended = command("reasoning.yaml", *MEGATRON, "actor.parallel.tensor=2", override)
    assert ended.code == 2
    assert "actor.parallel" in ended.err
    assert not (folder / "out").exists()
