"""Loading as a whole: lines, all problems at once, overrides, references, the resolved form, speed."""

from __future__ import annotations

import itertools
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rl_platform import extras
from rl_platform.config import load_config, loader
from rl_platform.config.explanations.accepted_values import walk
from rl_platform.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
VALUES = ["null", "-1", "1.5", "x", "[]", "[1]", "{}", "{a: 1}", "true", "${env}", "1e400"]  # an odd number
KL = [
    "algorithm.use_kl_loss=true",
    "algorithm.kl_loss_coef=0.1",
    "cluster.component_placement={'actor,critic,rollout,reward,reference': all}",
]
BROKEN = """\
runner:
  task_type: embodied
  gamma: 0.9
  max_steps: "8"
cluster:
  component_placement:
    actor_critic,env,rolout: all
algorithm:
  loss_type: actor_critik
  lam: 0.95
  clip_ratio_low: 2
  gae_lambda: 0.9
  gae_lambda: 0.8
env:
  id: CartPole-v1
  num_envs: true
  num_workers: 3
  rollout_steps: 10
data:
  mini_batch_size: ${data.nothing}
"""


def test_paths_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for name, keys, also in (
        ("embodied/cartpole", ["runner.output_dir", "env.python"], ["env.num_workers=2"]),
        ("embodied/robosuite_lift", ["runner.warm_start.demonstrations"], []),
        ("reasoning/ppo_tiny", ["rollout.vllm.python"], ["rollout.backend=vllm"]),
    ):
        config = load_config(CONFIGS / f"{name}.yaml", [*(f"{key}=~/there" for key in keys), *also]).config
        assert [attrgetter(key)(config) for key in keys] == ["/home/ada/there"] * len(keys)


def test_all_problems_at_once_in_the_order_of_lines(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(BROKEN)
    reported = [(problem.key, problem.where.rpartition(":")[2]) for problem in caught.value.problems]
    assert reported == [
        ("runner.gamma", "3"),
        ("runner.max_steps", "4"),
        ("cluster.component_placement.actor_critic,env,rolout", "7"),
        ("algorithm.loss_type", "9"),
        ("algorithm.lam", "10"),
        ("algorithm.clip_ratio_low", "11"),
        ("algorithm.gae_lambda", "13"),
        ("env.num_envs", "16"),
        ("data.mini_batch_size", "20"),
    ]
    assert caught.value.exit_code == 2
    assert all(problem.where.startswith(str(tmp_path / "run.yaml")) for problem in caught.value.problems)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("- 1\n", "no mapping"),
        ("a: [1\n", "not readable as YAML"),
        ("a: 1\n\tb: 2\n", "not readable as YAML"),
        ("a: \x07\n", "not readable as YAML"),
        ("a: 1\n---\nb: 2\n", "not readable as YAML"),
    ],
)
def test_unreadable_files(problems: Any, content: str, message: str) -> None:
    (problem,) = problems(content).values()
    assert message in problem.message
    assert "run.yaml" in problem.where


@pytest.mark.parametrize(("asked", "meant"), [("pp.yaml", "ppo.yaml"), ("ppo.yml", "ppo.yaml"), ("other.yaml", None)])
def test_a_missing_file_hints_at_the_one_beside_it(tmp_path: Path, asked: str, meant: str | None) -> None:
    (tmp_path / "ppo.yaml").write_text("")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / asked)
    (problem,) = error.value.problems
    assert problem.hint == (f"did you mean {tmp_path / meant}?" if meant else f"{tmp_path} holds ppo.yaml")


def test_where_falls_back_to_the_section(load: Any) -> None:
    loaded = load("embodied", "runner.seed=3", "actor.optim={lr: 0.1}")
    assert loaded.where("algorithm.loss_type").endswith(":7")
    assert loaded.where("algorithm.gamma").endswith(":6")
    assert loaded.where("runner.seed") == loaded.where("actor.optim.lr") == "command line"
    assert loaded.where("reward.type").endswith(":1")


class TestOverrides:
    def test_values_are_yaml_and_win_over_the_file(self, load: Any) -> None:
        config = load(
            "embodied",
            "env.id=Pendulum-v1",
            "actor.model.hidden_sizes=[8, 4]",
            "actor.optim={lr: 1e-3, betas: [0, 0.9]}",
            "algorithm.value_clip=null",
            "env.kwargs.gravity=9.8",
            "runner.seed=1",
            "runner.seed=2",
        ).config
        assert config.env.id == "Pendulum-v1"
        assert config.actor.model.hidden_sizes == [8, 4]
        assert config.actor.optim.lr == 1e-3
        assert config.actor.optim.betas == (0.0, 0.9)
        assert config.env.kwargs == {"gravity": 9.8}
        assert config.runner.seed == 2

    def test_a_whole_section_is_replaced_with_its_lines(self, load: Any) -> None:
        loaded = load("embodied", 'cluster.component_placement={actor: 0, "env,rollout": "1:0"}')
        assert loaded.config.cluster.component_placement == {"actor": "0", "env,rollout": "1:0"}
        assert "cluster.component_placement.actor_critic,env,rollout" not in loaded.sources

    def test_unknown_keys_are_located_at_the_command_line(self, problems: Any) -> None:
        reported = problems("embodied", "algorithm.gama=0.9", "nothing.at.all=1", "algorithm.lam=0.9")
        assert {problem.where for problem in reported.values()} == {"command line"}
        assert "algorithm.gamma" in reported["algorithm.gama"].hint
        assert "algorithm.gae_lambda" in reported["algorithm.lam"].message
        assert "nothing" in reported

    @pytest.mark.parametrize(
        "text",
        ["runner.seed", "=1", "runner..seed=1", "runner.seed=", "+runner.seed=1", "~runner.task_type=1", "~", "a.b=[1"],
    )
    def test_malformed(self, problems: Any, text: str) -> None:
        (problem,) = problems("embodied", text).values()
        assert problem.where == "command line"

    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            ("other.yaml", "a command takes one config, and a file can extend another: extends: FILE"),
            ("runner.seed: 3", "write runner.seed=3"),
            ("=", "write it without spaces around the equals sign"),
            ("runner.seed", "quote it if it contains spaces"),
        ],
    )
    def test_malformed_arguments_have_a_hint(self, problems: Any, text: str, hint: str) -> None:
        (problem,) = problems("embodied", text).values()
        assert problem.hint == hint

    def test_a_tilde_removes_a_key(self, load: Any, problems: Any) -> None:
        config = load(
            "reasoning", "actor.optim.lr=0.5", "~actor.optim.lr", "~data.task", "data.task.type=digits"
        ).config
        assert config.actor.optim.lr == load("reasoning").config.actor.optim.lr
        assert config.data.task.type == "digits"
        assert (
            "nothing to remove: data.task has no name"
            in problems("reasoning", "~data.task.name")["data.task.name"].message
        )
        assert (
            "rollout is not written"
            in problems("reasoning", "~rollout.sampling.top_p")["rollout.sampling.top_p"].message
        )

    def test_nothing_can_be_set_inside_a_value(self, problems: Any) -> None:
        assert "no section" in problems("embodied", "env.id.x=1")["env.id.x"].message


class TestReferences:
    def test_whole_values_keep_their_type_and_text_is_filled_in(self, load: Any) -> None:
        config = load(
            "embodied",
            "runner.seed=7",
            "env.evaluation.seed=${runner.seed}",
            "runner.experiment_name=run-${runner.seed}-${env.id}-${env.normalize_rewards}",
            "actor.model.hidden_sizes=[8, '${runner.seed}']",
        ).config
        assert config.env.evaluation.seed == 7
        assert config.runner.experiment_name == "run-7-CartPole-v1-true"
        assert config.runner.output_dir == "runs/run-7-CartPole-v1-true"
        assert config.actor.model.hidden_sizes == [8, 7]

    def test_a_whole_section(self, load: Any) -> None:
        config = load("reasoning", "actor.optim.lr=0.5", "critic.optim=${actor.optim}").config
        assert config.critic.optim == config.actor.optim

    def test_defaults_can_be_referred_to(self, load: Any) -> None:
        assert load("embodied", "env.evaluation.episodes=${env.num_envs}").config.env.evaluation.episodes == 8

    def test_escape(self, load: Any, tmp_path: Path) -> None:
        loaded = load("embodied", "runner.experiment_name=a$${b}")
        assert loaded.config.runner.experiment_name == "a${b}"
        (tmp_path / "resolved.yaml").write_text(loaded.resolved_yaml())
        assert load_config(tmp_path / "resolved.yaml").config == loaded.config

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("env.id", "${env.idd}", "names no key"),
            ("env.id", "${env.id}", "circle"),
            ("runner.experiment_name", "a${runner.output_dir}", "circle"),
            ("env.kwargs", "{a: '${env}'}", "circle"),
            ("env.id", "x${actor.optim}", "whole section"),
            ("env.id", "x${algorithm.value_clip}", "null"),
            ("env.id", "${env", "without its"),
        ],
    )
    def test_bad_references(self, problems: Any, key: str, value: str, message: str) -> None:
        reported = problems("embodied", f"{key}={value}")
        assert any(message in problem.message for problem in reported.values()), reported
        assert any("did you mean ${env.id}" in problem.hint for problem in reported.values()) == ("idd" in value)

    @pytest.mark.parametrize(
        ("value", "hint"),
        [
            ("${oc.env:NAME}", "write ${env:NAME}"),
            ("x/${oc.env:NAME,default}", "write ${env:NAME}; it has no default"),
            ("${eval:3*4}", "the value itself"),
            ("${now:%Y-%m-%d}", "the value itself"),
            ("${oc.decode:${oc.env:NAME}}", "a literal ${"),
            ("${nothing.name}", "a literal ${"),
        ],
    )
    def test_references_of_other_systems_are_one_problem(self, problems: Any, value: str, hint: str) -> None:
        reported = problems(
            "embodied", f"runner.experiment_name={value}", "env.evaluation.seed=${runner.experiment_name}"
        )
        assert list(reported) == ["runner.experiment_name"]
        assert hint in reported["runner.experiment_name"].hint

    @pytest.mark.parametrize(
        ("key", "reported"),
        [("foo.bar", "foo"), ("runner.foo", "runner.foo"), ("trainer.test_freq", "trainer.test_freq")],
    )
    def test_an_unknown_key_is_one_problem_whatever_its_references(
        self, problems: Any, key: str, reported: str
    ) -> None:
        assert list(problems("embodied", f"{key}=${{nothing.here}}")) == [reported]

    def test_a_cycle_is_spelled_out(self, problems: Any) -> None:
        reported = problems("embodied", "runner.seed=${env.num_envs}", "env.num_envs=${runner.seed}")
        assert any("runner.seed -> env.num_envs -> runner.seed" in problem.message for problem in reported.values())

    @pytest.mark.parametrize(
        ("count", "entry", "message"),
        [
            (40, "'${N}${N}'", "the values have more than 500000 characters"),
            (40, "['${N}', '${N}']", "the values have more than 500000 characters"),
            (3000, "'${N}'", "more than 50 references"),
        ],
    )
    def test_references_that_grow_without_end_are_refused(
        self, load: Any, count: int, entry: str, message: str
    ) -> None:
        chain = [f"  k{number}: {entry.replace('N', f'env.kwargs.k{number + 1}')}" for number in range(count)]
        with pytest.raises(ConfigError) as caught:
            load("\n".join(["env:", "  kwargs:", *(f"  {line}" for line in chain), f"    k{count}: x"]))
        assert [message in problem.message for problem in caught.value.problems] == [True]


def test_resolved_yaml_keeps_text_that_looks_like_something_else(load: Any, tmp_path: Path) -> None:
    loaded = load("embodied", 'env.kwargs={a: "1e5", b: "yes", c: "1:0", d: "0o7", e: "null", f: 1e-7, g: [1, true]}')
    (tmp_path / "resolved.yaml").write_text(loaded.resolved_yaml())
    assert load_config(tmp_path / "resolved.yaml").config == loaded.config


@pytest.mark.slow
@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_no_value_of_any_key_ends_in_anything_but_problems(task: str, load: Any) -> None:
    """Of every key one or two of the values in each task; the fuzzer combines all."""
    for number, (key, value) in enumerate(itertools.product([key for key, _ in walk()], VALUES)):
        if number % 8 != (0 if task == "embodied" else 4):  # 8 and the number of values have no common factor
            continue
        try:
            loaded = load(task, f"{key}={value}")
        except ConfigError as error:
            assert all(problem.where and problem.message for problem in error.problems)  # noqa: PT017
        else:
            assert loaded.resolved_yaml()


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_model_that_names_no_weights_is_the_actors_with_changes(role: str):
    config = load_config(CONFIGS / "reasoning" / "ppo_tiny.yaml", [*KL, f"{role}.model.dtype=bfloat16"]).config
    model = getattr(config, role).model
    assert model == config.actor.model.model_copy(update={"dtype": "bfloat16"})


def test_a_model_with_weights_of_its_own_inherits_nothing():
    config = load_config(CONFIGS / "reasoning" / "ppo_tiny.yaml", ["critic.model={path: ./other}"]).config
    assert config.critic.model.random_init is None
    assert config.critic.model.tokenizer is None


def test_a_stored_config_may_hold_keys_without_effect_and_overrides_may_not(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text((CONFIGS / "embodied" / "cartpole.yaml").read_text() + "critic: {kernels: torch}\n")
    with pytest.raises(ConfigError, match=r"critic\.kernels: has no effect"):
        load_config(path)
    assert load_config(path, stored=True).config.env.id == "CartPole-v1"
    with pytest.raises(ConfigError, match=r"rollout\.offload: has no effect"):
        load_config(path, ["rollout.offload=true"], stored=True)


def test_without_the_rules_every_config_with_valid_keys_is_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "is_present", lambda extra: extra != loader.RULES)
    loaded = load_config(CONFIGS / "embodied" / "cartpole.yaml", ["critic.kernels=torch"])
    assert "kernels: torch" in loaded.resolved_yaml()
    with pytest.raises(ConfigError, match=r"env\.num_envs"):
        load_config(CONFIGS / "embodied" / "cartpole.yaml", ["env.num_envs=0"])
