"""Configs, contexts and rollout batches for components that are constructed directly, without a runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from neutral_batches import neutral_batch

from rl_platform.components.reward import LanguageReward
from rl_platform.config.schema import Config
from rl_platform.records import RolloutBatch
from rl_platform.runtime.host import ComponentContext

TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "max_positions": 32}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def context() -> Callable[..., ComponentContext]:
    return stand_ins.context


@pytest.fixture
def reasoning(tmp_path: Path) -> Callable[..., Config]:
    """`reasoning(algorithm={...})`: a config with tiny models; sections given are merged into the defaults here."""

    def build(**sections: dict[str, Any]) -> Config:
        model = {"random_init": TINY, "tokenizer": "bytes"}
        defaults: dict[str, dict[str, Any]] = {
            "runner": {"task_type": "reasoning", "max_steps": 10, "output_dir": str(tmp_path)},
            "cluster": {"component_placement": {"actor,critic,rollout,reward": "all"}},
            "data": {"mini_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8},
            "actor": {"model": model, "optim": {"lr": 1e-2}},
            "critic": {"use_critic_model": True, "optim": {"lr": 1e-2}},
        }
        return Config(**{name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections})

    return build


@pytest.fixture
def language_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context, reasoning, closes
) -> Callable[..., LanguageReward]:
    """`language_reward("mine", SOURCE, type="mine:score")`: a reward whose processes can import the module `mine`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def build(module: str, source: str, **section: Any) -> LanguageReward:
        (tmp_path / f"{module}.py").write_text(source)
        return closes(LanguageReward(context("reward"), reasoning(reward=section)))

    return build


@pytest.fixture
def token_batch() -> Callable[..., RolloutBatch]:
    """Random sequences of bytes: two prompt tokens, then 1 to 6 sampled ones; estimates filled in."""

    def build(rows: int = 8, seed: int = 0) -> RolloutBatch:
        numbers = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (rows,), generator=numbers)
        shape, positions = (rows, 8), torch.arange(8)

        def noise() -> torch.Tensor:
            return torch.randn(shape, generator=numbers)

        return neutral_batch(
            (positions >= 2) & (positions < lengths[:, None]),
            inputs={"tokens": torch.randint(256, shape, generator=numbers), "lengths": lengths},
            rewards=noise(),
            rollout_log_probs=noise(),
            log_probs=noise() - 5.5,
            values=noise(),
            advantages=noise(),
            returns=noise(),
        )

    return build
