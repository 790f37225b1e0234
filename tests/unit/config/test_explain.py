"""Messages about single keys: types, ranges, spelling, names of other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.config.describe import field_at
from rl_platform.config.explanations.accepted_values import walk
from rl_platform.config.explanations.foreign_names import foreign_keys, foreign_sections, translate
from rl_platform.config.schema import Config


@pytest.mark.parametrize(
    ("override", "part", "text"),
    [
        ('runner.max_steps="8"', "hint", "without quotes"),
        ("actor.optim.lr='1e-3'", "hint", "without quotes"),
        ("runner.max_steps=8.0", "hint", "write 8"),
        ("runner.max_steps=true", "message", "true or false"),
        ("runner.max_steps=0", "allowed", "at least 1"),
        ("runner.max_steps=null", "message", "nothing stands here"),
        ("algorithm.gamma=1.5", "allowed", "a number from 0 to 1"),
        ("algorithm.gamma=true", "allowed", "a number"),
        ("algorithm.gamma=.nan", "message", "finite"),
        ("algorithm.clip_ratio_c=1", "allowed", "above 1, or null"),
        ("algorithm.normalize_advantages=yes", "hint", "write true"),
        ("algorithm.normalize_advantages=1", "hint", "write true"),
        ("algorithm.loss_agg_func=token_mean", "hint", "token-mean"),
        ("algorithm.loss_agg_func=TOKEN-MEAN", "hint", "token-mean"),
        ("algorithm.kl_ctrl=fixed", "allowed", "a mapping"),
        ("runner.experiment_name=3", "hint", "quotes"),
        ("runner.experiment_name=''", "message", "empty"),
        ("runner.logger_backends=tensorboard", "allowed", "a list"),
        ("actor.optim=null", "hint", "leave the key out"),
    ],
)
def test_wrong_values(problems: Any, override: str, part: str, text: str) -> None:
    (problem,) = problems("embodied", override).values()
    assert problem.key == override.partition("=")[0]
    assert text in getattr(problem, part), problem
    assert problem.where == "command line"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor.optim.betas=[0.9]", "actor.optim.betas"),
        ("actor.optim.betas=[0.9, 1.0]", "actor.optim.betas[1]"),
        ("actor.optim.betas=[0.9, 0.9, 0.9]", "actor.optim.betas"),
        ("actor.model.hidden_sizes=[]", "actor.model.hidden_sizes"),
        ("actor.model.hidden_sizes=[8, 0]", "actor.model.hidden_sizes[1]"),
        ("runner.logger_backends=[tensorbord]", "runner.logger_backends[0]"),
        ("cluster.node_groups=[{label: a}]", "cluster.node_groups[0].node_ranks"),
        ("cluster.node_groups=[{label: a, node_ranks: '0', lable: b}]", "cluster.node_groups[0].lable"),
    ],
)
def test_lists_are_located(problems: Any, override: str, key: str) -> None:
    (problem,) = problems("embodied", override).values()
    assert problem.key == key
    assert problem.allowed
    assert problem.where == "command line"


def test_a_hint_has_no_digits_that_nobody_wrote(problems: Any) -> None:
    assert problems("embodied", "runner.max_steps=1e3")["runner.max_steps"].hint == "write 1000"
    assert problems("embodied", "runner.max_steps=9e30")["runner.max_steps"].hint == ""


@pytest.mark.parametrize("name", ["optim.lr", "model.hidden_sizes", "optim"])
def test_names_with_dots_inside_a_section(problems: Any, name: str) -> None:
    reported = problems("embodied", f"actor={{{name}: {{}}}}")
    if name == "optim":
        assert not reported
        return
    problem = reported[f"actor.{name}"]
    section, _, key = name.partition(".")
    assert (problem.message, problem.hint) == (
        "unknown key",
        f"names hold no dots: write {key} inside the section actor.{section}",
    )


def test_a_section_for_anchors_is_refused_with_another_place(load: Any, problems: Any) -> None:
    (problem,) = problems("embodied", "x-optim={lr: 1e-4}").values()
    assert "define an anchor where it is first used" in problem.hint
    assert load("embodied", "actor={optim: &o {lr: 1e-4}, lora: null}").config.actor.optim.lr == 1e-4


def test_whole_numbers_are_numbers(load: Any) -> None:
    config = load("embodied", "algorithm.gamma=1", "actor.optim.betas=[0, 0]").config
    assert (config.algorithm.gamma, config.actor.optim.betas) == (1.0, (0.0, 0.0))
    assert isinstance(config.algorithm.gamma, float)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("runner.gamma", "belongs to algorithm.gamma"),
        ("algorithm.lr", "actor.optim.lr or critic.optim.lr"),
        ("algorithm.gae_lamda", "did you mean algorithm.gae_lambda?"),
        ("env.nmu_envs", "did you mean env.num_envs?"),
        ("env.NUM-ENVS", "did you mean env.num_envs?"),
        ("actor.lrr", "did you mean actor.optim.lr?"),
        ("runer", "did you mean runner?"),
        ("env.gae_lamda", "did you mean algorithm.gae_lambda?"),
    ],
)
def test_unknown_keys(problems: Any, key: str, hint: str) -> None:
    assert hint in problems("embodied", f"{key}=1")[key].hint


@pytest.mark.parametrize(
    "key",
    [
        "runner.eval_step",
        "runner.dropout",
        "runner.profiler",
        "algorithm.epsilon_decay",
        "rollout.temp",
        "actor.quantization",
    ],
)
def test_an_unknown_key_suggests_no_unrelated_one(problems: Any, key: str) -> None:
    assert problems("reasoning", f"{key}=1")[key].hint == ""


@pytest.mark.parametrize(
    ("size", "allowed"),
    [
        (256, "a divisor of 1920, as 240 or 320"),
        (1000, "a divisor of 1920, as 960 or 1920"),
        (4000, "a divisor of 1920, as 1920"),
        (10**9, "a divisor of 1920"),
    ],
)
def test_a_size_that_does_not_divide_is_told_its_neighbours(problems: Any, size: int, allowed: str) -> None:
    shape = ("env.num_envs=15", "env.rollout_steps=128", "env.num_workers=1")
    assert problems("embodied", f"data.mini_batch_size={size}", *shape)["data.mini_batch_size"].allowed == allowed


def test_a_misspelt_section_is_one_problem(problems: Any) -> None:
    reported = problems("embodied", "acotr={optim: {lr: 0.1}, group_name: a}")
    assert list(reported) == ["acotr"]
    assert "did you mean actor?" in reported["acotr"].hint


@pytest.mark.parametrize(
    ("key", "system", "here"),
    [
        ("algorithm.gae_gamma", "NeMo-RL", "algorithm.gamma"),
        ("algorithm.eps-clip", "slime", "algorithm.clip_ratio_low"),
        ("runner.critic_warmup", "verl", "algorithm.policy_training_start_step"),
        ("lambd", "slime", "algorithm.gae_lambda"),
        ("n_steps", "Stable-Baselines3", "env.rollout_steps"),
        ("clip_coef", "CleanRL", "algorithm.clip_ratio_low"),
        ("learning_rate", "TRL", "actor.optim.lr"),
        ("actor.max_tokens_per_mbs", "RLinf", "actor.max_tokens_per_micro_batch"),
        ("runner.eval_steps", "TRL", "runner.val_check_interval"),
        ("eval_freq", "Stable-Baselines3", "runner.val_check_interval"),
        ("actor.optim.epsilon", "TRL", "actor.optim.eps"),
        ("critic.model_path", "RLinf", "critic.model.path"),
    ],
)
def test_names_of_other_systems(problems: Any, key: str, system: str, here: str) -> None:
    """Of each system, and names in a section of ours. `foreign_paths.txt` has the other ones."""
    (problem,) = problems("embodied", f"{key}=1").values()
    name = key.rpartition(".")[2]
    assert problem.message.startswith(f"`{name}` is {system}'s name; here it is {here}")


PATHS = (Path(__file__).parent / "foreign_paths.txt").read_text(encoding="utf-8").split("\n\n")[1:]


@pytest.mark.parametrize("block", PATHS, ids=lambda block: block.splitlines()[0])
def test_keys_where_other_systems_write_them(problems: Any, block: str) -> None:
    rows = [row.split(" -> ") for row in block.splitlines()[1:]]
    reported = problems("embodied", *(f"{there}=1" for there, _ in rows))
    for there, here in rows:
        if there == here:
            assert field_at(there) is not None
            continue
        problem = reported[there]
        named = problem.message.partition("here it is ")[2] or problem.hint.partition("this key belongs to ")[2]
        nothing = "no key" if "there is no such key here" in problem.message else ""
        assert (nothing or named).replace(" and ", " ").replace(" or ", " ") == here, there
        assert here == "no key" or all(field_at(key) is not None for key in here.split()), there


def test_every_key_of_a_foreign_section_is_one_problem(problems: Any) -> None:
    reported = problems(
        "embodied",
        "trainer={esi_redundant_time: 0, device: cuda, nnodes: 2}",
        "ppo={seed: 3, adv_estimator: {name: gae, mystery: 1}, async_ppo: {enabled: true}}",
        "policy={sequence_packing: {algorithm: x}, optimizer: {name: adam}}",
        "algorithm.filter_groups={enable: true, max_num_gen_batches: 3}",
        "critic.megatron={tensor_model_parallel_size: 2, seed: 1}",
        "logger={}",
        "runner.logging_steps=10",
    )
    assert {key: (problem.message, problem.hint) for key, problem in reported.items()} == {
        "trainer.esi_redundant_time": ("unknown key", "keys of `trainer` go to runner and cluster"),
        "trainer.device": ("unknown key", "keys of `trainer` go to runner and cluster"),
        "trainer.nnodes": ("`nnodes` is verl's name; here it is cluster.num_nodes", ""),
        "ppo.seed": ("`seed` is NeMo-RL's name; here it is runner.seed", ""),
        "ppo.adv_estimator.name": ("`name` is NeMo-RL's name; here it is algorithm.adv_type", ""),
        "ppo.adv_estimator.mystery": ("unknown key", "`adv_estimator` is algorithm.adv_type here"),
        "ppo.async_ppo.enabled": ("unknown key", "`async_ppo` is runner.max_staleness here"),
        "policy.sequence_packing.algorithm": (
            "unknown key",
            "`sequence_packing` is actor.max_tokens_per_micro_batch here",
        ),
        "policy.optimizer.name": ("`name` is NeMo-RL's name; here it is actor.optim", "always AdamW"),
        "algorithm.filter_groups.enable": ("unknown key", "`filter_groups` is algorithm.dynamic_sampling here"),
        "algorithm.filter_groups.max_num_gen_batches": (
            "`max_num_gen_batches` is verl's name; here it is algorithm.dynamic_sampling.max_rounds",
            "",
        ),
        "critic.megatron.tensor_model_parallel_size": (
            "`tensor_model_parallel_size` is verl's name; here it is critic.parallel.tensor",
            "",
        ),
        "critic.megatron.seed": ("unknown key", ""),
        "logger": ("`logger` is NeMo-RL's section; here its keys go to runner", ""),
        "runner.logging_steps": ("`logging_steps` is TRL's name; there is no such key here", "every step is logged"),
    }


def test_every_foreign_name_leads_to_a_key_and_none_is_our_own() -> None:
    ours = {path for path, _ in walk()}
    for name, foreign in foreign_keys().items():
        assert foreign.here or foreign.note, name
        assert all(field_at(key) is not None for key in foreign.here), name
    for section in foreign_sections():
        assert section not in Config.model_fields
    leaves = {path.rpartition(".")[2] for path in ours}
    assert not {name for name in foreign_keys() if "." not in name} & leaves


def test_the_longest_listed_end_of_a_path_decides() -> None:
    """And of two systems with one name the first in the table."""
    assert translate("rollout_correction.rollout_is").here == ("algorithm.rollout_is.level",)
    assert translate("trainer.rollout-correction").here == ("algorithm.rollout_is",)
    assert translate("max_grad_norm").system == "TRL"
    assert translate("policy.max_grad_norm").here == ("actor.optim.clip_grad",)
    assert translate("seed_of_nothing") is None


def test_every_key_has_a_meaning() -> None:
    assert [path for path, field in walk() if not field.description] == []
