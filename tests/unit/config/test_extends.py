"""Files that extend others: what is merged and what replaced, lines of the right file, circles, saved configs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.errors import ConfigError, Problem

BASE = """\
runner:
  task_type: embodied
  experiment_name: base
  max_steps: 7
cluster:
  component_placement:
    actor_critic,env,rollout: all
algorithm:
  loss_type: actor_critic
  gamma: 0.9
actor:
  model: {hidden_sizes: [8, 8]}
env:
  id: CartPole-v1
"""
CHILD = """\
extends: ../base.yaml
runner:
  experiment_name: child
cluster:
  component_placement:
    actor_critic: 0
    env,rollout: 0
actor:
  model: {hidden_sizes: [4]}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """write(name=text): files, by their paths in a new folder; `__` is a slash."""

    def write(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def problem_of(path: Path, *overrides: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    (problem,) = caught.value.problems
    return problem


def test_sections_are_merged_and_the_placement_replaced(write: Any) -> None:
    loaded = load_config(write(base=BASE, sub__child=CHILD) / "sub/child.yaml")
    config = loaded.config
    assert (config.runner.experiment_name, config.runner.max_steps, config.algorithm.gamma) == ("child", 7, 0.9)
    assert config.runner.output_dir == "runs/child"
    assert config.cluster.component_placement == {"actor_critic": "0", "env,rollout": "0"}
    assert config.actor.model.hidden_sizes == [4]


def test_lines_are_those_of_the_file_that_wrote_the_key(write: Any) -> None:
    folder = write(base=BASE, sub__child=CHILD)
    loaded = load_config(folder / "sub/child.yaml")
    assert loaded.where("runner.max_steps") == f"{folder}/base.yaml:4"
    assert loaded.where("runner.experiment_name") == f"{folder}/sub/child.yaml:3"
    assert loaded.where("cluster.component_placement.env,rollout") == f"{folder}/sub/child.yaml:7"
    assert "cluster.component_placement.actor_critic,env,rollout" not in loaded.sources
    write(base=BASE.replace("gamma: 0.9", "gamma: 9"))
    problem = problem_of(folder / "sub/child.yaml")
    assert (problem.key, problem.where) == ("algorithm.gamma", f"{folder}/base.yaml:10")
    write(base=BASE.replace("gamma: 0.9", "gamma: [9"))
    assert problem_of(folder / "sub/child.yaml").where.startswith(f"{folder}/base.yaml:")


def test_null_switches_off_what_the_other_file_has(write: Any) -> None:
    folder = write(base=BASE + "  max_episode_steps: 9\n", child="extends: base.yaml\nenv: {max_episode_steps: null}\n")
    assert load_config(folder / "base.yaml").config.env.max_episode_steps == 9
    assert load_config(folder / "child.yaml").config.env.max_episode_steps is None


def test_a_chain_and_the_command_line(write: Any) -> None:
    last = "extends: sub/child.yaml\nrunner: {seed: 5}\n"
    folder = write(base=BASE, sub__child=CHILD, last=last)
    loaded = load_config(folder / "last.yaml", ["runner.max_steps=2"])
    runner = loaded.config.runner
    assert (runner.experiment_name, runner.max_steps, runner.seed) == ("child", 2, 5)
    assert loaded.where("runner.max_steps") == "command line"


def test_the_saved_form_stands_alone(write: Any) -> None:
    folder = write(base=BASE, sub__child=CHILD)
    loaded = load_config(folder / "sub/child.yaml")
    write(saved=loaded.resolved_yaml())
    assert "extends" not in loaded.resolved_yaml()
    assert load_config(folder / "saved.yaml").config == loaded.config


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"child": "extends: nothing.yaml\n"}, "the file cannot be read: No such file or directory: .*nothing.yaml"),
        ({"child": "extends: [a, b]\n"}, "names no file"),
        ({"child": "extends:\n"}, "names no file"),
        ({"child": "extends: child.yaml\n"}, "in a circle: child.yaml -> child.yaml"),
        (
            {"child": "extends: other.yaml\n", "other": "extends: child.yaml\n"},
            "in a circle: child.yaml -> other.yaml -> child.yaml",
        ),
        ({"child": "extends: empty.yaml\n", "empty": ""}, "empty.yaml holds no mapping"),
    ],
)
def test_files_that_cannot_be_extended(write: Any, files: dict[str, str], message: str) -> None:
    folder = write(**files)
    problem = problem_of(folder / "child.yaml")
    assert re.search(message, problem.message)
    assert problem.key == "extends"
    assert problem.where.endswith(".yaml:1")
