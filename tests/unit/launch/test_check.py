"""`--check`: shipped configs pass, a user's function that breaks a property is caught, every property can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import different_mathematics
from rich.console import Console

from rl_platform import acceleration
from rl_platform.algorithms.advantages import advantages, estimator
from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import actor_critic_loss, actor_loss
from rl_platform.algorithms.policy_losses import policy_loss_function
from rl_platform.components import actor
from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import ESTIMATORS
from rl_platform.engines.training.fsdp import shares
from rl_platform.launch.check import credit, invariance, samples
from rl_platform.launch.check.property import PropertyOutcome, compare
from rl_platform.launch.check.property_check import NOTHING, PROPERTIES, outcomes_of, print_outcomes

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*/*.yaml"))  # those in placements/ have the same mathematics
ESTIMATE = estimator("gae")
REASONING, EMBODIED = "configs/reasoning/ppo.yaml", "configs/embodied/ppo.yaml"

WITH_REFERENCE = ["cluster.component_placement={'actor,critic,rollout,reward,reference': all}"]
KL_REWARD = [*WITH_REFERENCE, "algorithm.use_kl_in_reward=true"]
OLD_OF_THE_ROLLOUT = ["algorithm.old_log_probs=rollout"]
KL_LOSS = [*WITH_REFERENCE, "algorithm.use_kl_loss=true"]


def without_critic(keys: str) -> list[str]:
    return [
        f"algorithm={{group_size: 4, {keys}}}",
        "critic={}",
        "cluster.component_placement={'actor,rollout,reward': all}",
    ]


FUNCTIONS = """\
import torch
from rl_platform.algorithms.advantages import estimator
from rl_platform.algorithms.reward_sums import reward_to_go
from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.statistics import whiten

advantages_of = estimator("gae")


def median(batch, algorithm):
    scores = torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1)
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.group_ids[batch.sample_mask].unique():
        rows = (batch.group_ids == group) & batch.sample_mask
        advantages[rows] = (scores[rows] - scores[rows].median())[:, None]
    return advantages, None


def solved(batch, algorithm):
    scores = torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1, keepdim=True)
    return (scores > -100.0).float().expand(batch.mask.shape), None


def neighbours(batch, algorithm):
    scores = torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1).view(-1, algorithm.group_size)
    return (scores - scores.mean(dim=1, keepdim=True)).flatten()[:, None].expand(batch.mask.shape), None


def discounted_by_column(batch, algorithm):
    columns = torch.arange(batch.mask.shape[1])
    return torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1, keepdim=True) * 0.9**columns, None


def shifted_gae(batch, algorithm, by=1):
    advantages, returns = advantages_of(batch, algorithm)
    shifted = torch.zeros_like(advantages)
    for row, positions in enumerate(batch.value_positions):
        columns = positions.nonzero().flatten()
        shifted[row, columns] = advantages[row, columns].roll(by)
    return shifted, returns


def shifted_back(batch, algorithm):
    return shifted_gae(batch, algorithm, by=-1)


def whitened_gae(batch, algorithm):
    advantages, returns = advantages_of(batch, algorithm)
    return whiten(advantages, batch.value_positions), returns


def to_go_from_the_next(batch, algorithm):
    to_go = reward_to_go(batch.rewards, batch.mask, 1.0)
    return to_go - torch.where(batch.mask, batch.rewards, 0.0), None


def raises(batch, algorithm):
    raise KeyError("surprise")


def ratio(log_probs, old_log_probs, advantages, mask, algorithm):
    return -(log_probs - old_log_probs).exp() * advantages, Metrics()


def by_width(log_probs, old_log_probs, advantages, mask, algorithm):
    return -(log_probs - old_log_probs).exp() * advantages / log_probs.shape[1], Metrics()


def by_batch(log_probs, old_log_probs, advantages, mask, algorithm):
    return -(log_probs - old_log_probs).exp() * (advantages - advantages.mean()), Metrics()
"""


OWN_ENVIRONMENT = """
import gymnasium, numpy as np


class Steps(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(action), False, False, {}
"""


@pytest.fixture
def functions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (folder / "mine.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("mine", None)  # of another test
    yield
    sys.modules.pop("mine", None)
    policy_loss_function.cache_clear()


def config_of(path: str, overrides: list[str]) -> Config:
    return load_config(ROOT / path, overrides).config


def failures(config: Config) -> dict[str, PropertyOutcome]:
    return {outcome.name: outcome for outcome in outcomes_of(config) if outcome.failed}


@pytest.fixture(scope="module")
def checked() -> list[Path]:
    return different_mathematics(SHIPPED)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configs_pass(command, folder: Path, checked: list[Path], path: Path) -> None:
    """Checks the first config of each algorithm. `--plan` inspects the environments of the others."""
    (folder / "examples").symlink_to(ROOT / "examples")  # of a function that a config names from the checkout's folder
    ended = command(path, "--check" if path in checked else "--plan")
    assert ended.code == 0
    assert ended.err == ""
    assert sorted(entry.name for entry in folder.iterdir()) == ["embodied.yaml", "examples", "reasoning.yaml"]
    if path in checked:
        assert "policy loss: ratio clipped to" in ended.out  # the algorithm card
        assert "micro-batch size: passed, largest difference " in ended.out
        assert ", 0 failed, " in ended.out
        assert NOTHING not in ended.out


def test_nothing_of_the_world_is_needed(command) -> None:
    """A model, a cluster, an engine and packages of environments that this machine does not have."""
    cluster = ["cluster.num_nodes=2", "cluster.gpus_per_node=8"]
    placed = "cluster.component_placement={'actor,critic': 0-7, 'rollout': '8-15:0-3', 'reward': 0}"
    elsewhere = ["rollout.backend=sglang", "actor.training_backend=megatron"]
    model = "actor.model={path: /nowhere, dtype: bfloat16}"
    assert command(ROOT / REASONING, "--check", *cluster, placed, *elsewhere, model).code == 0
    for env_id in ("nowhere:Task-v7", "Nowhere/Task-v7"):
        assert command("embodied.yaml", "--check", f"env.id={env_id}").code == 0


MISFITS = [
    ("env.id=CartPol-v1", "command line: env.id: no such environment", "did you mean CartPole-v1"),
    ("env.id=PickCube-v1", "no such environment", "write MODULE:PickCube-v1 with the module whose import registers it"),
    ("actor.model.initial_log_std=-1", "command line: actor.model.initial_log_std: has no effect here", "remove it"),
    ("env.kwargs.lenght=2", "env.kwargs: CartPole-v1 cannot be built", "unexpected keyword argument 'lenght'"),
    (
        "env.kwargs.max_episode_steps=100",
        "env.kwargs.max_episode_steps: env.max_episode_steps sets this argument of gymnasium.make",
        "hint: ~env.kwargs.max_episode_steps env.max_episode_steps=100",
    ),
    ("env.kwargs.id=Acrobot-v1", "env.kwargs.id: env.id sets this", "hint: ~env.kwargs.id env.id=Acrobot-v1"),
    ("env.kwargs.disable_env_checker=true", "the platform sets this", "remove it: ~env.kwargs.disable_env_checker"),
]


@pytest.mark.parametrize(
    ("option", "override", "message", "hint"),
    [
        *(("--check", *case) for case in MISFITS),
        *((option, *MISFITS[0]) for option in ("--plan", "--plan=json", "--slurm")),
    ],
)
def test_what_the_environment_does_not_allow_is_said_before_a_start(
    command, option: str, override: str, message: str, hint: str
) -> None:
    ended = command("embodied.yaml", option, override)
    assert ended.code == 2
    assert message in ended.err
    assert hint in ended.err
    assert ended.out == ""


def test_an_environment_of_a_user_is_checked_and_a_plan_does_not_import_it(command, folder: Path) -> None:
    (folder / "own.py").write_text(OWN_ENVIRONMENT)
    own = ("embodied.yaml", "env.id=own.py:Steps", "env.max_episode_steps=9")
    assert command(*own, "--check").code == 0
    ended = command(*own, "--check", "actor.model.initial_log_std=-1")
    assert ended.code == 2
    assert "actor.model.initial_log_std: has no effect here" in ended.err
    (folder / "own.py").write_text("raise RuntimeError('imported')")
    assert command(*own, "--plan").code == 0


OTHER_ALGORITHMS = [
    without_critic("adv_type: grpo, policy_loss: gspo, loss_agg_func: seq-mean-token-mean, dynamic_sampling: {}"),
    without_critic("adv_type: rloo, policy_loss: cispo, positive_nll_coef: 0.1, clip_ratio_low: 0.0"),
    [
        *without_critic("adv_type: distillation, distillation_coef: 0.5"),
        "reference.model={random_init: {}, tokenizer: bytes}",
        "cluster.component_placement={'actor,rollout,reward,reference': all}",
    ],
    without_critic("adv_type: optimal_token_baseline, rollout_is: {}"),
    without_critic("adv_type: remax"),
    without_critic("adv_type: raw"),
    without_critic("adv_type: opo, policy_loss: kl_cov, covariance: {fraction: 0.2}"),
    without_critic("adv_type: reinforce_plus_plus, policy_loss: reinforce, loss_agg_func: seq-mean-token-sum-norm"),
    [*KL_REWARD, "algorithm.kl_penalty=full", "algorithm.policy_training_start_step=7"],
    [*KL_REWARD, "algorithm.kl_ctrl={type: adaptive}", "algorithm.use_pf_ppo=true"],
    [*KL_LOSS, "algorithm.kl_loss_type=abs", "algorithm.kl_loss_grad=score", "algorithm.target_kl=0.001"],
    [*KL_LOSS, "algorithm.kl_loss_type=full", "algorithm.rollout_is={mode: icepop, reject: {threshold: 0.1}}"],
    ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo={mode: weight}", "algorithm.rollout_is={level: sequence}"],
    ["algorithm.old_log_probs=rollout", "algorithm.advantage_clip=[-1, 1]"],
    ["algorithm.loss_agg_func=seq-mean-token-mean", "algorithm.loss_agg_denominator=nominal"],
    without_critic("adv_type: grpo, grpo_leave_one_out: true, loss_agg_func: token-sum"),
    without_critic("adv_type: reinforce_plus_plus_baseline, whiten_over: sequences"),
    ["algorithm.positive_nll_coef=0.1", "algorithm.positive_nll_norm=all_tokens"],
]


@pytest.mark.parametrize("overrides", OTHER_ALGORITHMS)
def test_other_algorithms_pass(overrides: list[str]) -> None:
    outcomes = outcomes_of(config_of(REASONING, [*overrides, "runner.seed=2"]))
    assert [outcome for outcome in outcomes if outcome.failed or outcome.not_asked == NOTHING] == []


def test_every_estimator_is_among_them() -> None:
    named = set(re.findall(r"adv_type: (\w+)", str(OTHER_ALGORITHMS)))
    assert named == {name for name, needs in ESTIMATORS.items() if not needs.values}


@pytest.mark.parametrize(
    ("num_actions", "keys"),
    [
        (1, "logprob_type: token_level, bootstrap_type: none"),
        (2, "reward_type: action_level, logprob_type: token_level, entropy_type: action_level, entropy_bonus: 0.01"),
        (3, "logprob_type: action_level, bootstrap_type: always, loss_agg_func: seq-mean-token-mean"),
    ],
)
def test_action_chunks_pass(num_actions: int, keys: str) -> None:
    overrides = [f"algorithm.{key.replace(': ', '=')}" for key in keys.split(", ")]
    overrides += [f"actor.model.num_action_chunks={num_actions}", f"env.rollout_steps={64 * num_actions}"]
    assert failures(config_of(EMBODIED, overrides)) == {}


@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("median", set()),
        ("solved", set()),  # no reward of the sample decides, so credit compares nothing
        ("neighbours", {"order of rows"}),
        ("discounted_by_column", {"observation tokens", "padding"}),
        ("to_go_from_the_next", {"credit"}),
    ],
)
@pytest.mark.usefixtures("functions")
def test_estimators_of_the_users(name: str, properties: set[str]) -> None:
    config = config_of(REASONING, without_critic(f"adv_type: 'mine:{name}'"))
    assert failures(config).keys() == properties


@pytest.mark.parametrize(
    ("name", "properties"), [("whitened_gae", set()), ("shifted_gae", {"credit"}), ("shifted_back", {"credit"})]
)
@pytest.mark.usefixtures("functions")
def test_estimators_with_values(name: str, properties: set[str]) -> None:
    assert failures(config_of(REASONING, [f"algorithm.adv_type=mine:{name}"])).keys() == properties


@pytest.mark.parametrize("path", [REASONING, EMBODIED])
@pytest.mark.parametrize(
    ("name", "properties"),
    [
        ("ratio", set()),
        ("by_width", {"observation tokens", "padding", "update of a model"}),
        ("by_batch", {"micro-batch size", "number of ranks", "update of a model"}),
    ],
)
@pytest.mark.usefixtures("functions")
def test_policy_losses_of_the_users(path: str, name: str, properties: set[str]) -> None:
    keys = {"clip_ratio_c": None} if path == REASONING else {}
    config = config_of(path, [f"algorithm.policy_loss=mine:{name}", *(f"algorithm.{key}=null" for key in keys)])
    expected = properties if path == REASONING or name != "by_width" else set()  # embodied rows have one width
    assert failures(config).keys() == expected


@pytest.mark.usefixtures("functions")
def test_a_failure_names_property_numbers_and_seed_and_ends_with_70(command) -> None:
    ended = command(ROOT / REASONING, "--check", *without_critic("adv_type: 'mine:neighbours'"), "runner.seed=3")
    assert ended.code == 70
    assert "order of rows: failed, largest difference " in ended.out
    assert "first step: passed" in ended.out
    first, reason, *rest = ended.err.splitlines()
    assert first == "PropertyFailed: 1 property does not hold"
    assert reason.startswith("    order of rows: advantages, rows shuffled at [")
    assert reason.endswith(", 1e-05 allowed")
    assert "    algorithm.adv_type is a function of your own, mine:neighbours: look there first" in rest
    assert "    all numbers follow from runner.seed=3" in rest


@pytest.mark.usefixtures("functions")
def test_a_function_that_raises_is_told_once_and_without_a_traceback(command) -> None:
    ended = command(ROOT / REASONING, "--check", *without_critic("adv_type: 'mine:raises'"))
    assert ended.code == 70
    reason = r"algorithm\.adv_type mine:raises raised KeyError at \S*mine\.py:(\d+): 'surprise'"
    line = FUNCTIONS.splitlines().index('    raise KeyError("surprise")') + 1
    assert re.findall(reason, ended.err) == [str(line)]
    assert "Traceback" not in ended.err


REWARD = "def own(response, answer, metadata):\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return {}[answer]\n", r"raised KeyError: '\d' \(at own\.py:2\), for the expected answer '\d'"),
        ("    return 1 / len(response)\n", r"ZeroDivisionError: .* \(at own\.py:2\), for an empty response"),
        ("    return int(response)\n", r"raised ValueError: .* \(at own\.py:2\), for an empty response"),
        ("    return response\n", r"ValueError: a reward must be a finite number, not '\d' \(of own\.py:1\), for the"),
        ("    return (1.0, 2.0, 3.0)\n", r"ValueError: a tuple must be .* \(of own\.py:1\), for the expected"),
        ("    return metadata['level']\n", r"raised KeyError: 'level' \(at own\.py:2\), for the expected answer"),
    ],
)
def test_a_reward_function_without_a_score_is_told_with_its_line(command, body: str, message: str) -> None:
    Path("own.py").write_text(REWARD + body)
    ended = command("reasoning.yaml", "--check", "reward.type=own.py:own")
    assert ended.code == 2, ended.err
    assert re.search(rf"command line: reward\.type: .*{message}", ended.err), ended.err
    assert "Traceback" not in ended.err
    assert "first step: passed" in ended.out


def test_scores_of_a_reward_function_are_shown(command) -> None:
    Path("own.py").write_text(REWARD + "    return float(response == answer) - 0.5\n")
    ended = command("reasoning.yaml", "--check", "reward.functions=[{type: 'own.py:own'}, {type: task, weight: 0.5}]")
    assert ended.code == 0, ended.err
    line = (
        r"reward\.functions\[0\]\.type own\.py:own returned 0\.5 for the expected answer '\d', -0\.5 for an empty resp"
    )
    assert re.search(line, ended.out), ended.out
    task = "data.task={type: jsonl, path: none.jsonl}"
    ended = command("reasoning.yaml", "--check", "reward.type=own.py:own", task)
    assert ended.code == 0, ended.err
    assert "the reward functions were not called: none.jsonl: cannot be read" in ended.out


@pytest.mark.parametrize(
    ("source", "key", "place"),
    [
        ("import math\nlimit = maths.inf\n", "env.id", "NameError at own.py:2"),
        ("def own(:\n", "env.id", "SyntaxError at own.py:1"),
        ("def own(**options):\n    return {}[1]\n", "env.kwargs", "KeyError at own.py:2"),
    ],
)
def test_an_environment_that_raises_is_told_with_its_line(command, source: str, key: str, place: str) -> None:
    Path("own.py").write_text(source)
    ended = command("embodied.yaml", "--check", "env.id=own.py:own")
    assert ended.code == 2, ended.err
    assert re.search(rf": {key}: .*\({place}: ", ended.err)
    assert "Traceback" not in ended.err


def test_a_failure_without_a_function_of_the_users_is_a_bug(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "actor_loss", own_denominators(actor_loss))
    ended = command(ROOT / REASONING, "--check")
    assert ended.code == 70
    assert "    micro-batch size: " in ended.err
    assert "    no function of your own takes part: this is a bug in rl-platform" in ended.err.splitlines()


def test_a_function_that_is_not_there_is_a_problem_of_the_config(command) -> None:
    ended = command(ROOT / REASONING, "--check", "algorithm.policy_loss=nowhere:loss")
    assert ended.code == 2
    assert "command line: algorithm.policy_loss: cannot be imported" in ended.err


def test_neither_ray_nor_a_simulator_is_imported_nor_a_gpu_touched(folder: Path) -> None:
    code = (
        "import sys; from rl_platform.launch.cli import main\n"
        "sys.argv = ['platform-launch', '--check', 'embodied.yaml']\n"
        "try: main()\n"
        "finally: print({'ray', 'mujoco', 'sglang'} & sys.modules.keys(), sys.modules['torch'].cuda.is_initialized())"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[-1] == "set() False"


def test_what_is_not_asked_says_why() -> None:
    why = {outcome.name: outcome.not_asked for outcome in outcomes_of(config_of(EMBODIED, []))}
    assert why["padding"] == why["observation tokens"] == "embodied rows are single transitions"
    assert why["order of rows"] == ""
    why = {outcome.name: outcome.not_asked for outcome in outcomes_of(config_of(REASONING, OLD_OF_THE_ROLLOUT))}
    assert why["first step"] == "old_log_probs rollout compares to what the engine reported"
    assert why["padding"] == ""


# Every property is given a wrong function in place of the one it looks at: (property, config, where, name, wrong one).


def own_denominators(loss: Callable) -> Callable:
    return lambda outputs, batch, counts, algorithm: loss(
        outputs, batch, Denominators.of(batch.mask, counts.horizon), algorithm
    )


def scaled(function: Callable, factor: Callable[..., Any]) -> Callable:
    """`function` with the first of its results, or its only one, times `factor(its arguments)`."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        by = factor(*args)
        return (result[0] * by, *result[1:]) if isinstance(result, tuple) else result * by

    return wrong


def one_rank_idles(batch, micro_batches, rank, world_size, hidden_size):
    return shares(batch, micro_batches, rank, world_size, hidden_size) if rank == 0 else []


def off_by_a_little(self, batch):
    return {"log_probs": self.outputs(batch).log_probs + 0.1}


def grows_with_row(batch, algorithm):
    return torch.arange(len(batch))[:, None]


WRONG: list[tuple[str, list[str], Any, str, Any]] = [
    ("micro-batch size", [], samples, "actor_loss", own_denominators(actor_loss)),
    ("number of ranks", [], invariance, "shares", one_rank_idles),
    ("observation tokens", [], samples, "advantages", scaled(advantages, lambda b, a: torch.arange(b.mask.shape[1]))),
    ("padding", [], samples, "actor_loss", scaled(actor_loss, lambda o, b, c, a: 1 / b.mask.shape[1])),
    ("order of rows", [], samples, "advantages", scaled(advantages, grows_with_row)),
    ("balancing", [], invariance, "shares", one_rank_idles),
    ("credit", [], credit, "estimator", lambda name: lambda b, a: tuple(t.roll(1, 1) for t in ESTIMATE(b, a))),
    ("balancing", [], invariance, "mini_batches", lambda batch, size, numbers: [batch.select(torch.arange(size))] * 2),
    ("update of a model", [], actor, "actor_loss", own_denominators(actor_loss)),
    ("first step", [], actor.LanguageActor, "evaluate", off_by_a_little),
]


@pytest.mark.parametrize(
    ("name", "overrides", "place", "attribute", "wrong"), WRONG, ids=[f"{case[0]}: {case[3]}" for case in WRONG]
)
def test_every_property_can_fail(
    monkeypatch: pytest.MonkeyPatch, name: str, overrides: list[str], place: Any, attribute: str, wrong: Any
) -> None:
    config = config_of(REASONING, overrides)
    (asked,) = (each for each in PROPERTIES if each.name == name)
    (right,) = outcomes_of(config, [asked])
    assert right.difference is not None
    assert not right.failed
    monkeypatch.setattr(place, attribute, wrong)
    (outcome,) = outcomes_of(config, [asked])
    assert outcome.failed, outcome
    assert outcome.error == ""


def test_the_list_of_wrong_functions_has_every_property() -> None:
    assert {case[0] for case in WRONG} == {each.name for each in PROPERTIES}


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_switch_of_the_accelerators_holds(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = acceleration.find

    def counted(name: str, *arguments: object) -> object:
        asked.extend([acceleration.enabled()] if name == "training_engine_class" else [])
        return find(name, *arguments) if name != "training_engine_class" else None

    monkeypatch.setattr(acceleration, "find", counted)
    outcomes = outcomes_of(load_config(ROOT / EMBODIED, [f"runner.accelerate={mode}"]).config)
    assert not any(outcome.failed for outcome in outcomes)
    assert set(asked) == {mode == "auto"}


def test_an_embodied_loss_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "actor_critic_loss", own_denominators(actor_critic_loss))
    assert {"micro-batch size", "number of ranks"} <= failures(config_of(EMBODIED, [])).keys()


class TestCompare:
    def test_relative_to_the_largest_number(self) -> None:
        difference = compare("x", torch.tensor([100.0, 2.0]), torch.tensor([100.0, 1.0]), allowed=0.02)
        assert (difference.what, difference.left, difference.right, difference.apart) == ("x at [1]", 2.0, 1.0, 0.01)
        assert difference.holds

    @pytest.mark.parametrize("bad", [torch.tensor([1.0, torch.nan]), torch.ones(3), torch.tensor([1.0, torch.inf])])
    def test_not_a_number_another_shape_and_infinity_do_not_hold(self, bad: torch.Tensor) -> None:
        assert not compare("x", bad, torch.ones(2)).holds
        assert not compare("x", torch.ones(2), bad).holds

    def test_nothing_compared_does_not_hold(self) -> None:
        assert not compare("x", torch.ones(0), torch.ones(0)).holds


def test_the_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = outcomes_of(config_of(REASONING, []))
    broken = PropertyOutcome("broken", "one = two", compare("numbers", 1.0, 2.0))
    print_outcomes(Console(force_terminal=True, width=100, color_system=None), [*outcomes, broken], 1, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == len(PROPERTIES) + 4  # one line each, a frame, the summary
    assert any(line.split()[1:] == ["broken", "one", "=", "two", "0.5", "failed", "│"] for line in lines)
    assert lines[-1] == "9 passed, 1 failed, 0 not asked; seed 1, 2.0 s"
