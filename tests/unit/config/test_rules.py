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

from rl_platform.config.checks import without
from rl_platform.config.describe import choices, field_at, walk
from rl_platform.config.rules import broken, without_effect
from rl_platform.config.schema.algorithm import (
    ESTIMATORS,
    POLICY_LOSSES,
    KLLossType,
    KLPenalty,
    LossAggregation,
)

PLACED = "cluster.component_placement"
NAMES = {
    "REFERENCE": f"{PLACED}={{'actor,critic,rollout,reward,reference': all}}",
    "NO_CRITIC": f"critic.use_critic_model=false; {PLACED}={{'actor,rollout,reward': all}}",
    "TINY": "actor.model={random_init: {}, tokenizer: bytes}",
    "VLA": "actor.model.type=vla; actor.model.path=folder; actor.model.instruction=reach",
    "PIXELS": "env.pixels={width: 48}; env.num_workers=2",
    "GRU": "data.mini_batch_size=128; actor.model.type=gru",
}
NAMES["GROUPS"] = f"{NAMES['NO_CRITIC']}; algorithm.adv_type=grpo; algorithm.group_size=8"


def overrides_of(text: str) -> list[str]:
    return re.sub(r"\b[A-Z_]{3,}\b", lambda name: NAMES[name[0]], text).split("; ")


def cases(name: str) -> list[list[str]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")]


def refused() -> Iterator[tuple[str, list[str], str, str]]:
    for task, text, key, reason in cases("refused.txt"):
        overrides = overrides_of(text)
        yield task, overrides, key or overrides[-1].partition("=")[0], reason


@pytest.mark.parametrize(("task", "overrides", "key", "reason"), list(refused()), ids=str)
def test_refused(problems, task: str, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems(task, *overrides).values()
    assert problem.key == key
    assert reason in str(problem)
    assert problem.where
    assert field_at(key) or key.startswith(PLACED) or "unknown key" in str(problem) or "[" in key

    section = key.partition("[")[0].rpartition(".")[0]
    section = "cluster" if section.startswith("cluster") else section or "env"
    beside = problems(task, f"{section}.zzzz=1", *overrides) if section != "reward" else problems(task, *overrides)
    assert key in beside, "hidden by an unknown key of the same section"


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


def test_all_of_them_at_once(problems) -> None:
    reported = problems(
        "reasoning",
        "algorithm={clip_ratio_low: 2, clip_ratio_c: 1, use_kl_loss: true, use_kl_in_reward: true, policy_loss: gspo}",
        "algorithm.dynamic_sampling={}",
        "data.train_batch_size=60",
    )
    algorithm = ["clip_ratio_low", "clip_ratio_c", "use_kl_loss", "loss_agg_func", "dynamic_sampling"]
    assert set(reported) == {*(f"algorithm.{name}" for name in algorithm), "data.mini_batch_size", PLACED}


def test_pf_ppo_breaks_up_groups(load) -> None:
    config = load("reasoning", "algorithm.use_pf_ppo=true").config
    grouped = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"adv_type": "grpo"})})
    (problem,) = (problem for problem in broken(grouped) if problem.key == "algorithm.use_pf_ppo")
    assert "break up groups" in problem.message


@pytest.mark.parametrize(
    ("key", "known", "misspelt"),
    [
        ("adv_type", tuple(ESTIMATORS), "reinforce_plusplus"),
        ("policy_loss", POLICY_LOSSES, "ppo_clipp"),
        ("loss_agg_func", choices(LossAggregation), "token-means"),
        ("kl_penalty", choices(KLPenalty), "k33"),
        ("kl_loss_type", choices(KLLossType), "low_var_kl_"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    problems, key: str, known: tuple[str, ...], misspelt: str
) -> None:
    problem = problems("reasoning", f"algorithm.{key}={misspelt}")[f"algorithm.{key}"]
    assert known
    assert [name for name in known if name not in f"{problem.message} {problem.allowed}"] == []
    assert "did you mean" in problem.hint


def test_resume_accepts_an_existing_path(load, tmp_path: Path) -> None:
    assert load("embodied", f"runner.resume={tmp_path}").config.runner.resume == str(tmp_path)


@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_no_key_with_an_effect_of_its_own_is_refused(load, task: str) -> None:
    """What is left acts in this task: the sections of the other task are gone, the common ones are not."""
    unread = {unread.key for unread in without_effect(load(task).config)}
    assert all(field_at(key) for key in unread)
    gone = {path.partition(".")[0] for path, _ in walk() if path in unread and "." not in path}
    assert gone == ({"reward", "reference"} if task == "embodied" else {"env", "reference"})
