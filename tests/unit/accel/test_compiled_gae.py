"""The compiled GAE returns what the plain one returns, and replaces it where it covers the tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.accel.compiled_gae import ROWS_AT_ONCE, compiled_gae
from rl_platform.algorithms import gae as module
from rl_platform.algorithms.gae import _plain_gae, gae

NAN = float("nan")


def near(actual: Tensor, expected: Tensor) -> None:
    """To 1e-6 of the largest number: sums of thousands of terms have zeros where no relative error holds."""
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


def case(rows: int, length: int, density: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rewards and values that are NaN outside the mask, and the mask."""
    numbers = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, rows, length, generator=numbers, dtype=dtype)
    mask = torch.rand(rows, length, generator=numbers) < density
    rewards[~mask] = values[~mask] = NAN
    return [rewards, values, mask]


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0, torch.tensor([0.95, 0.3, 1.0])], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.05, 0.7, 2.0])
def test_masked_rows(lam: float | Tensor, density: float) -> None:
    arguments = case(3, 2048, density)
    expected = _plain_gae(*arguments, 1.0, lam, None, None)
    for one, other in zip(compiled_gae(*arguments, 1.0, lam), expected, strict=True):
        near(one, other)
        assert not one[~arguments[2]].any()


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (2 * ROWS_AT_ONCE + 2, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_episodes_within_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rewards, values, mask = case(*shape, 0.8, dtype)
    numbers = torch.Generator().manual_seed(1)
    end_values, ends = torch.randn(shape, generator=numbers, dtype=dtype), torch.rand(shape, generator=numbers) < 0.3
    end_values[~ends] = NAN
    arguments = rewards, values, mask, 0.9, 0.8, ends, end_values
    turned = [x.t().contiguous().t() if isinstance(x, Tensor) else x for x in arguments]
    expected = _plain_gae(*arguments)
    for results in (compiled_gae(*arguments), compiled_gae(*turned), gae(*arguments)):
        for one, other in zip(results, expected, strict=True):
            near(one, other)
            assert not one[~mask].any()


@pytest.mark.parametrize("spread", [0.01, 1.0, 1e4])
@pytest.mark.parametrize("episodes", [False, True])
def test_values_of_ten_thousand_do_not_drown_the_advantages(episodes: bool, spread: float) -> None:
    numbers = torch.Generator().manual_seed(1)
    rewards, noise, reached = torch.randn(3, 16, 300, generator=numbers)
    values, mask = 1e4 + spread * noise, torch.rand(16, 300, generator=numbers) < 0.8
    ends, end_values = (torch.rand(16, 300, generator=numbers) < 0.05, 1e4 + spread * reached)
    own = (ends, end_values) if episodes else (None, None)
    exact = _plain_gae(rewards.double(), values.double(), mask, 0.99, 0.95, *own)[0]  # held to the definition elsewhere
    advantages, _ = compiled_gae(rewards, values, mask, 0.99, 0.95, *own)
    assert (advantages - exact).abs()[mask].max() < 1e-5 * exact[mask].std()


def test_large_batches_and_batches_with_ends_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(*arguments: object) -> tuple[Tensor, Tensor]:
        calls.append("compiled")
        return compiled_gae(*arguments)

    monkeypatch.setattr("rl_platform.accel.build.gae_function", lambda values: counted)
    monkeypatch.setattr(module, "COMPILE_FROM", 3 * 64)
    arguments = case(3, 64, 0.5)
    gae(*(x[:, :63] for x in arguments), 1.0, 0.95)
    assert not calls
    gae(*arguments, 1.0, 0.95)
    assert len(calls) == 1
    gae(*(x[:, :7] for x in arguments), 1.0, 0.95, torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3, 7))
    assert len(calls) == 2


def test_only_float32_and_float64_on_a_cpu_are_compiled() -> None:
    values = torch.zeros(2, 3)
    assert acceleration.find("gae_function", values) is compiled_gae
    assert acceleration.find("gae_function", values.double()) is compiled_gae
    assert acceleration.find("gae_function", values.bfloat16()) is None
    assert acceleration.find("gae_function", values.to("meta")) is None
    rewards, values, mask = case(3, 64, 0.5)
    assert gae(rewards.bfloat16(), values.bfloat16(), mask, 1.0, 0.95)[0].dtype == torch.bfloat16
