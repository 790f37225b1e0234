"""The training runs of `ranks.py`, importable by tests although tests are no package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(Path(__file__).with_name("ranks.py"))


@pytest.fixture(scope="session")
def shared(script: Callable[[Path], ModuleType]) -> ModuleType:
    """Models, prompts and checks of the rollout engines."""
    return script(Path(__file__).with_name("test_rollout.py"))
