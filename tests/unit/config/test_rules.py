"""Rules between keys: what is refused and why, the valid neighbours that pass, and all problems at once.

`refused.txt` and `accepted.txt` have one case per line, its cells separated by `|`: the task, the overrides separated
by `; `, and in `refused.txt` the key of the one problem (empty: that of the last override) and a part of its text.
A word in capitals stands for the overrides in `NAMES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from problem_sites import Sites, recorded_sites, unreached

from rl_platform.config import rules
from rl_platform.config.describe import field_at
from rl_platform.config.explanations.accepted_values import choices, walk
from rl_platform.config.rules import broken, without_effect
from rl_platform.config.rules.checks import without
from rl_platform.config.schema.algorithm import ESTIMATORS, POLICY_LOSSES, KLLossType, KLPenalty, LossAggregation

PLACED = "cluster.component_placement"
NAMES = {
    "REFERENCE": f"{PLACED}={{'actor,critic,rollout,reward,reference': all}}",
    "NO_CRITIC": f"critic.use_critic_model=false; {PLACED}={{'actor,rollout,reward': all}}",
    "TINY": "actor.model={random_init: {}, tokenizer: bytes}",
    "VLA": "actor.model.type=vla; actor.model.path=folder; actor.model.instruction=reach",
    "FLOW": "actor.model={type: pi0, random_init: {}, tokenizer: bytes, instruction: reach}",
    "PIXELS": "env.pixels={width: 48}; env.num_workers=2",
    "WHOLE": "algorithm={loss_type: actor}; env.max_episode_steps=128",
    "OWN": "~env.id; env.backend=mine:Carts",
    "GRU": "data.mini_batch_size=128; actor.model.type=gru",
}
NAMES["GROUPS"] = f"{NAMES['NO_CRITIC']}; algorithm.adv_type=grpo; algorithm.group_size=8"


def overrides_of(text: str) -> list[str]:
    return re.sub(r"\b[A-Z_]{3,}\b", lambda name: NAMES.get(name[0], name[0]), text).split("; ")


def cases(name: str) -> list[list[str]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")]


def refused() -> Iterator[tuple[str, list[str], str, str]]:
    for task, text, key, reason in cases("refused.txt"):
        overrides = overrides_of(text)
        yield task, overrides, key or overrides[-1].partition("=")[0], reason


REFUSED = list(refused())
RULES = Path(rules.__file__).parent


@pytest.fixture(scope="module")
def made() -> Iterator[Sites]:
    """The places where the refused configs make their problems."""
    with recorded_sites() as sites:
        yield sites


@pytest.mark.parametrize(("task", "overrides", "key", "reason"), REFUSED, ids=str)
def test_refused(problems, made: Sites, task: str, overrides: list[str], key: str, reason: str) -> None:
    section = key.partition("[")[0].rpartition(".")[0]
    section = "cluster" if section.startswith("cluster") else section or "runner"
    reported = problems(task, f"{section}.zzzz=1", *overrides) if section != "reward" else problems(task, *overrides)
    assert {*reported} - {f"{section}.zzzz"} == {key}, "also beside an unknown key of the same section"
    problem = reported[key]
    assert reason in str(problem)
    assert problem.where == "command line" if "has no effect here" in problem.message else problem.where
    assert field_at(key) or key.startswith(PLACED) or "unknown key" in str(problem) or "[" in key


def test_every_rule_has_a_case(request: pytest.FixtureRequest, made: Sites) -> None:
    if sum(item.originalname == "test_refused" for item in request.session.items) < len(REFUSED):
        pytest.skip("needs all cases of test_refused before it")
    missing = [site for path in RULES.glob("*.py") for site in unreached(path, made)]
    assert not missing, f"add a case of each to refused.txt: {missing}"


@pytest.mark.parametrize(("task", "text"), cases("accepted.txt"))
def test_accepted(problems, task: str, text: str) -> None:
    assert problems(task, *overrides_of(text)) == {}


@pytest.mark.parametrize(
    ("task", "overrides", "keys"),
    [
        ("reasoning", ["data.task={type: jsonl, zzzz: 1}"], ["data.task.zzzz", "data.task.path"]),
        ("embodied", ["algorithm.rollout_is={zzzz: 1}"], ["algorithm.rollout_is", "algorithm.rollout_is.zzzz"]),
        ("embodied", ["algorithm=3", "env.num_workers=9"], ["algorithm", "env.num_workers"]),
        ("embodied", ["runner.task_type=x", "cluster.address=x"], ["runner.task_type", "cluster.address"]),
        ("embodied", ["runner.task_type=!unset", "cluster.address=x"], ["runner.task_type", "cluster.address"]),
        (
            "reasoning",
            ["reward={type: model, model: {}}", "data.train_batch_size=60"],
            ["reward.model.path", "data.mini_batch_size"],
        ),
        (
            "embodied",
            ["env.tasks=[{name: a b}, {name: c, instruction: d}]"],
            ["env.tasks[0].name", "env.tasks[1].instruction"],
        ),
        ("embodied", ["env.tasks=[3, {name: c}]", "env.num_workers=9"], ["env.tasks[0]", "env.num_workers"]),
        ("embodied", [f"{PLACED}.rollot=${{no.key}}"], [f"{PLACED}.rollot"]),
        ("reasoning", [f"{PLACED}=3", "cluster.address=x"], [PLACED, "cluster.address"]),
        (
            "reasoning",
            ["cluster.inventory={nodes: 2}", "cluster.address=x"],
            ["cluster.inventory.gpus_per_node", "cluster.address"],
        ),
        ("embodied", ["env.num_envs=x", "data.mini_batch_size=1000", "env.id=null"], ["env.num_envs", "env.id"]),
        (
            "embodied",
            ["algorithm.loss_agg_func=x", "algorithm.loss_agg_horizon=9", "algorithm.kl_loss_coef=0.1"],
            ["algorithm.loss_agg_func", "algorithm.kl_loss_coef"],
        ),
    ],
)
def test_a_wrong_key_hides_the_rules_that_read_it_and_no_others(
    problems, task: str, overrides: list[str], keys: list[str]
) -> None:
    assert set(problems(task, *overrides)) == set(keys)


@pytest.mark.parametrize(
    ("task", "text"),
    [("embodied", "VLA"), ("embodied", "GRU"), ("embodied", "PIXELS"), ("reasoning", "TINY"), ("reasoning", "GROUPS")],
)
def test_no_rule_guesses_a_key_that_cannot_be_read(load, task: str, text: str) -> None:
    config = load(task, *overrides_of(text)).config
    without_any = {unread.key for unread in without_effect(config)}
    for key, _ in walk():
        partial = without(config, [key])
        assert list(broken(partial)) == []
        assert {unread.key for unread in without_effect(partial)} <= without_any


def test_all_problems_at_once(problems) -> None:
    reported = problems(
        "reasoning",
        "algorithm={clip_ratio_low: 2, clip_ratio_c: 1, use_kl_loss: true, use_kl_in_reward: true, policy_loss: gspo}",
        "algorithm.dynamic_sampling={}",
        "data.train_batch_size=60",
    )
    wrong = ("clip_ratio_low", "clip_ratio_c", "use_kl_loss", "loss_agg_func", "dynamic_sampling")
    assert set(reported) == {*(f"algorithm.{key}" for key in wrong), "data.mini_batch_size", PLACED}


@pytest.mark.parametrize(
    ("key", "known", "misspelt", "switches"),
    [
        ("adv_type", tuple(ESTIMATORS), "reinforce_plusplus", ""),
        ("policy_loss", POLICY_LOSSES, "ppo_clipp", ""),
        ("loss_agg_func", choices(LossAggregation), "token-means", ""),
        ("kl_penalty", choices(KLPenalty), "k33", "REFERENCE; algorithm.use_kl_in_reward=true; "),
        ("kl_loss_type", choices(KLLossType), "low_var_kl_", "REFERENCE; algorithm.use_kl_loss=true; "),
    ],
)
def test_an_unknown_name_is_answered_with_all_known_ones(
    problems, key: str, known: tuple[str, ...], misspelt: str, switches: str
) -> None:
    (problem,) = problems("reasoning", *overrides_of(f"{switches}algorithm.{key}={misspelt}")).values()
    assert known
    assert [name for name in known if name not in f"{problem.message} {problem.allowed}"] == []
    assert "did you mean" in problem.hint


def test_an_unknown_key_of_any_section_is_answered_with_the_nearest(problems) -> None:
    """One letter more at the end of the first key of each section, all at once."""
    keys = {path.rpartition(".")[0]: path for path, _ in reversed([*walk()]) if "." in path}
    reported = problems("reasoning", *(f"{key}z=1" for key in keys.values()))
    hints = {key: reported[f"{key}z"].hint for key in keys.values()}
    assert [key for key, hint in hints.items() if key.rpartition(".")[2] not in hint] == []


def test_resume_accepts_an_existing_path(load, tmp_path: Path) -> None:
    assert load("embodied", f"runner.resume={tmp_path}").config.runner.resume == str(tmp_path)


@pytest.mark.parametrize(
    ("task", "sections"), [("embodied", {"reward", "reference"}), ("reasoning", {"env", "reference"})]
)
def test_sections_without_effect_are_those_of_the_other_task(load, task: str, sections: set[str]) -> None:
    unread = list(without_effect(load(task).config))
    assert all(field_at(key) is not None for rule in unread for key in (rule.key, *rule.switches))
    without = {rule.key for rule in unread}
    assert {path for path, _ in walk() if path in without and "." not in path} == sections
