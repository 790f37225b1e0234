"""Files that extend others: what is merged and what replaced, lines of the right file, circles, saved configs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.config.explanations.near_files import SHIPPED
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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("aple", "did you mean aple.yml?"),
        ("banan.yaml", "did you mean banana.yaml?"),
        ("zzz.yaml", ". holds aple.yml, banana.yaml"),
        (".", ". holds aple.yml, banana.yaml"),
        ("fruit/banana.yaml", "did you mean configs/fruit/banana.yaml?"),
        ("cartpole.yaml", f"did you mean {SHIPPED}/embodied/cartpole.yaml?"),
        ("configs/fruit", "did you mean configs/fruit/config.yaml?"),
        ("none/zzz.yaml", "there is no folder none"),
        ("none/deep/zzz.yaml", "there is no folder none/deep"),
        ("broken.yaml", "it is a symbolic link to gone.yaml, which does not exist"),
        ("\N{EN DASH}-plan", "an option begins with two hyphens: --plan"),
        ("empty/zzz.yaml", "empty holds no YAML file"),
        ("many", "many holds a0.yaml, a1.yaml, a2.yaml, a3.yaml, a4.yaml, a5.yaml, a6.yaml, a7.yaml and 2 more"),
    ],
)
def test_a_config_that_is_not_there_has_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    files = ["aple.yml", "banana.yaml", "configs/fruit/banana.yaml", "configs/fruit/config.yaml", "empty/x.txt"]
    for name in (*files, *(f"many/a{number}.yaml" for number in range(10))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "broken.yaml").symlink_to("gone.yaml")
    monkeypatch.chdir(tmp_path)
    assert problem_of(Path(path)).hint == hint


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the name of the file is empty"):
        load_config(name)


TASK = """\
runner: {task_type: reasoning}
cluster:
  component_placement: {"actor,critic,rollout,reward": all}
data:
  task: {type: digits, params: {operation: last, length: 2}}
  train_size: 60
actor:
  model: {path: folder}
critic:
  use_critic_model: true
"""
JSONL = "extends: base.yaml\ndata:\n  task: {type: jsonl, path: x.jsonl}\n"


def test_keys_of_a_type_no_longer_chosen_are_not_inherited(write: Any) -> None:
    loaded = load_config(write(base=TASK, child=JSONL) / "child.yaml")
    task = loaded.config.data.task
    assert task is not None
    assert (task.type, task.path, task.params) == ("jsonl", "x.jsonl", {})
    noted = " ".join(loaded.notes)
    assert "data.task.params.operation" in noted
    assert "data.train_size" in noted
    assert "base.yaml:6" in noted
    assert "data.task.type is another" in noted


def test_the_command_line_treats_the_file_likewise(write: Any) -> None:
    loaded = load_config(write(base=TASK) / "base.yaml", ["data.task.type=jsonl", "data.task.path=x.jsonl"])
    assert loaded.config.data.task is not None
    assert loaded.config.data.task.params == {}


def test_parameters_of_another_type_are_not_mixed(write: Any) -> None:
    child = "extends: base.yaml\ndata:\n  task: {type: reasoning_gym, name: chain_sum, params: {min_terms: 2}}\n"
    task = load_config(write(base=TASK, child=child) / "child.yaml").config.data.task
    assert task is not None
    assert task.params == {"min_terms": 2}


@pytest.mark.parametrize(
    ("base", "override", "key", "left"),
    [
        ("reward: {type: http, url: 'http://a/b', retries: 1}\n", "reward.type=task", "reward.url", None),
        ("rollout: {backend: sglang, engine_args: {a: 1}}\n", "rollout.backend=torch", "rollout.engine_args", {}),
        ("reward: {type: http, url: 'http://a/b'}\n", "reward.type=exact_match", "reward.retries", 3),
    ],
)
def test_other_choices(write: Any, base: str, override: str, key: str, left: Any) -> None:
    config = load_config(write(base=TASK + base) / "base.yaml", [override]).config
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == left


def test_a_simulator_does_not_inherit_what_only_the_other_can(write: Any) -> None:
    base = BASE.replace("CartPole-v1", "Hopper-v5") + "  num_envs: 8\n  num_workers: 2\n"
    config = load_config(write(base=base) / "base.yaml", ["env.backend=mujoco_warp"]).config
    assert (config.env.num_workers, config.env.num_envs) == (0, 8)


def test_what_the_same_file_writes_is_refused(write: Any) -> None:
    folder = write(base=TASK, child=JSONL.replace("x.jsonl", "x.jsonl, params: {a: 1}"))
    problem = problem_of(folder / "child.yaml")
    assert (problem.key, problem.where) == ("data.task.params", f"{folder}/child.yaml:3")


def test_a_size_takes_no_key_away_and_the_hint_works(write: Any) -> None:
    base = BASE.replace("gamma: 0.9", "target_kl: 0.1") + "data: {mini_batch_size: 512}\n"
    folder = write(base=base, child="extends: base.yaml\n")
    override = "data.mini_batch_size=1024"
    problem = problem_of(folder / "child.yaml", override)
    assert problem.key == "algorithm.target_kl"
    assert "algorithm.target_kl: !unset" in problem.hint
    assert load_config(folder / "child.yaml", [override, "algorithm.target_kl=!unset"])


class TestTags:
    def test_unset_takes_a_key_and_a_section_away(self, write: Any) -> None:
        child = "extends: base.yaml\nrunner: {max_steps: !unset }\nactor: {model: !unset }\n"
        config = load_config(write(base=BASE, child=child) / "child.yaml").config
        assert (config.runner.max_steps, config.actor.model.hidden_sizes) == (100, [256, 256])

    def test_replace_does_not_merge(self, write: Any) -> None:
        child = "extends: base.yaml\nrunner: !replace {task_type: embodied, seed: 5}\n"
        config = load_config(write(base=BASE, child=child) / "child.yaml").config
        assert (config.runner.seed, config.runner.experiment_name, config.runner.max_steps) == (5, "ppo", 100)

    def test_on_the_command_line(self, write: Any) -> None:
        loaded = load_config(write(base=BASE) / "base.yaml", ["runner.max_steps=!unset", "actor.model=!replace {}"])
        assert (loaded.config.runner.max_steps, loaded.config.actor.model.hidden_sizes) == (100, [256, 256])

    @pytest.mark.parametrize(
        ("text", "key", "message"),
        [
            ("runner: {max_step: !unset }", "runner.max_step", "this one is not inherited"),
            ("reward: {url: !unset }", "reward.url", "this one is not inherited"),
            ("env: {kwargs: !replace {a: 1}}", "env.kwargs", "there is none"),
            ("runner: {max_steps: !unset 5}", "runner.max_steps", "takes no value"),
            ("runner: {max_steps: !replace 5}", "runner.max_steps", "only sections are merged"),
            ("actor: {model: {hidden_sizes: [!unset ]}}", "actor.model.hidden_sizes[0]", "inside a list"),
            ("env: !replace {id: !unset }", "env.id", "this one is not inherited"),
            ("cluster: {component_placement: {env: !unset }}", "cluster.component_placement.env", "not inherited"),
        ],
    )
    def test_without_something_inherited_they_are_refused(self, write: Any, text: str, key: str, message: str) -> None:
        folder = write(base=BASE, child=f"extends: base.yaml\n{text}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(folder / "child.yaml")
        reported = {problem.key: problem for problem in caught.value.problems}
        assert message in reported[key].message
        assert reported[key].where == f"{folder}/child.yaml:2"

    def test_the_nearest_name_is_the_hint(self, write: Any) -> None:
        folder = write(base=BASE, child="extends: base.yaml\nrunner: {max_step: !unset }\n")
        assert problem_of(folder / "child.yaml").hint == "did you mean runner.max_steps?"
        assert problem_of(folder / "base.yaml", "runner.max_step=!unset").hint == "did you mean runner.max_steps?"
