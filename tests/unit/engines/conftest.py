"""The training runs of `ranks.py`, importable by tests although tests are no package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from process_groups import end_process_groups


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(Path(__file__).with_name("ranks.py"))


@pytest.fixture(scope="module")
def runs(script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """The training runs of `megatron_ranks.py`."""
    yield script(Path(__file__).with_name("megatron_ranks.py"))
    end_process_groups()


@pytest.fixture(scope="session")
def shared(script: Callable[[Path], ModuleType]) -> ModuleType:
    """Models, prompts and checks of the rollout engines."""
    return script(Path(__file__).with_name("test_rollout.py"))
