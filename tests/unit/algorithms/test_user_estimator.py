"""A user's estimator: imported by name, its results checked; and the right version of the tutorial."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.algorithms.advantages import advantages, estimator
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.errors import ConfigError
from rl_platform.records import RolloutBatch

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorials" / "own-algorithm.md"
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)


def make_batch(**fields: Any) -> RolloutBatch:
    return neutral_batch(
        MASK,
        group_ids=torch.zeros(3, dtype=torch.int64),
        rewards=torch.tensor([[0, 1.0, 0], [0, 0, 3.0], [2.0, 0, 0]]),
        **fields,
    )


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """module(source): the name of a module with it, importable during the test."""

    def write(source: str) -> str:
        (tmp_path / "users_estimators.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "users_estimators", raising=False)
        return "users_estimators"

    return write


def fails(name: str, **fields: Any) -> str:
    with pytest.raises(ConfigError) as failed:
        advantages(make_batch(**fields), Algorithm(adv_type=name))
    (problem,) = failed.value.problems
    assert (problem.key, problem.value) == ("algorithm.adv_type", name)
    return problem.message


def test_result_is_used_and_zero_outside_the_mask(module: Callable[[str], str]) -> None:
    name = module("def estimate(batch, algorithm):\n    return batch.rewards / batch.mask, None\n")
    algorithm = Algorithm(adv_type=f"{name}:estimate", normalize_advantages=False)
    estimated, returns = advantages(make_batch(), algorithm)
    assert returns is None
    assert estimated.tolist() == [[0, 1, 0], [0, 0, 3], [2, 0, 0]]
    whitened, _ = advantages(make_batch(), algorithm.model_copy(update={"normalize_advantages": True}))
    assert float(whitened[MASK].mean()) == pytest.approx(0, abs=1e-6)


def test_config_and_values_reach_it_and_returns_come_back(module: Callable[[str], str]) -> None:
    name = module("def estimate(b, a):\n    return b.values * a.gamma, b.values + 1\n")
    algorithm = Algorithm(adv_type=f"{name}:estimate", gamma=0.5, normalize_advantages=False)
    estimated, returns = advantages(make_batch(values=torch.ones(3, 3)), algorithm)
    assert torch.equal(estimated, 0.5 * MASK)
    assert returns is not None
    assert torch.equal(returns, 2.0 * MASK)


def test_a_gradient_of_the_result_is_cut(module: Callable[[str], str]) -> None:
    """The losses differentiate log-probs and values only; the embodied loss copies advantages with NumPy."""
    name = module("def estimate(b, a):\n    return b.rewards.clone().requires_grad_(), b.rewards\n")
    algorithm = Algorithm(adv_type=f"{name}:estimate", normalize_advantages=False)
    estimated, _ = advantages(make_batch(values=torch.zeros(3, 3)), algorithm)
    assert not estimated.requires_grad


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("b.rewards", "returned Tensor, not a pair"),
        ("(b.rewards[:, 1:], None)", "returned advantages as [3, 2], not as a tensor [3, 3]"),
        ("(b.rewards.tolist(), None)", "returned advantages as list, not as a tensor [3, 3]"),
        ("(b.rewards / 0, None)", "advantages that are not finite, first at (0, 0): nan"),
        ("(b.rewards, 1 / b.rewards)", "returns that are not finite, first at (0, 0): inf"),
    ],
)
def test_results_that_cannot_be_used(module: Callable[[str], str], result: str, message: str) -> None:
    name = module(f"def estimate(b, a):\n    return {result}\n")
    assert message in fails(f"{name}:estimate")


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        ("b.rewards.mul_(2)", "batch.rewards"),
        ("b.rollout_log_probs[0, 0] = 1", "batch.rollout_log_probs"),
        ("b.inputs['tokens'].zero_()", "batch.inputs['tokens']"),
        ("b.rewards = b.rewards.clone()", "batch.rewards"),
    ],
)
def test_it_must_not_change_the_batch(module: Callable[[str], str], change: str, tensor: str) -> None:
    name = module(f"def estimate(b, a):\n    {change}\n    return b.rewards.clone(), None\n")
    batch = make_batch()
    batch.inputs["tokens"] = torch.ones(3, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"work on a copy, as batch\.") as caught:
        advantages(batch, Algorithm(adv_type=f"{name}:estimate"))
    assert f"changed {tensor}, which it is lent" in caught.value.problems[0].message


def test_it_may_read_inference_tensors(module: Callable[[str], str]) -> None:
    name = module("def estimate(b, a):\n    return b.rewards.clone(), None\n")
    with torch.inference_mode():
        batch = make_batch()
        batch.rewards = batch.rewards + 0
    advantages(batch, Algorithm(adv_type=f"{name}:estimate"))


def test_a_critic_needs_returns(module: Callable[[str], str]) -> None:
    name = module("def estimate(b, a):\n    return b.rewards, None\n")
    assert "a critic is trained on them" in fails(f"{name}:estimate", values=torch.zeros(3, 3))


def test_what_cannot_be_imported(module: Callable[[str], str]) -> None:
    assert "ModuleNotFoundError" in fails("no_such_module:estimate")
    assert "AttributeError" in fails(f"{module('x = 1')}:estimate")
    assert "is not a function" in fails(f"{module('estimate = 1')}:estimate")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        estimator(f"{module('1 / 0')}:estimate")


def test_the_example_of_the_tutorial(module: Callable[[str], str]) -> None:
    _, code = re.findall(r"```python\n(import torch\n.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    algorithm = Algorithm(adv_type=f"{module(code)}:median_baseline", group_size=3, normalize_advantages=False)
    estimated, returns = advantages(make_batch(), algorithm)
    assert returns is None
    assert estimated.tolist() == [[-1, -1, 0], [1, 1, 1], [0, 0, 0]]
