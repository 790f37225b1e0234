"""Settings of accelerators' arithmetic: applied within a run, and as before after it."""

from __future__ import annotations

import os

import pytest
import torch

from rl_platform import numerics
from rl_platform.environment_variables import inherited


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell that started the tests may have set it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def settings() -> tuple[object, ...]:
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        {name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", numerics.VARIABLE)},
    )


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_settings_hold_within_the_block_only(precision: str, deterministic: bool) -> None:
    before = settings()
    with numerics.computing(precision, deterministic=deterministic, here=True):
        tf32, convolutions, repeats, _, variables = settings()
        assert tf32 == convolutions == (precision == "high")
        assert repeats == deterministic
        assert (variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8") == deterministic  # type: ignore[index]
        assert inherited(numerics.VARIABLE) == {numerics.VARIABLE: os.environ[numerics.VARIABLE]}
    assert settings() == before


def test_a_launcher_of_other_processes_passes_the_settings_on_and_keeps_its_own() -> None:
    before = settings()[:-1]
    with numerics.computing("high", deterministic=True, here=False):
        assert settings()[:-1] == before
        assert inherited(numerics.VARIABLE) == {numerics.VARIABLE: "high deterministic"}
    assert inherited(numerics.VARIABLE) == {}


def test_a_size_of_workspaces_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with numerics.computing("highest", deterministic=True, here=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_cpu_products_stay_float32() -> None:
    one, other = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected = one @ other
    with numerics.computing("high", deterministic=True, here=True):
        assert torch.equal(one @ other, expected)
