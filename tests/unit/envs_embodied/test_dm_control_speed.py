"""Versions of dm_control that lack what the faster functions read."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from rl_platform.acceleration import accelerating
from rl_platform.envs.embodied.suites.dm_control_speed import quicken


@pytest.mark.parametrize("lacks", ["every attribute", "those of an instance"])
def test_functions_of_another_version_stay(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, scored = [], []

    class Physics:
        def step(self, nstep: int = 1) -> None:
            steps.append(nstep)

    class FieldIndexer:
        def _convert_key(self, key: object) -> object:
            return key

    contents = {
        "mujoco.engine": {"Physics": Physics},
        "mujoco.index": {"FieldIndexer": FieldIndexer} if lacks == "those of an instance" else {},
        "utils.rewards": {"tolerance": scored.append},
    }
    for name in ("", ".mujoco", ".utils", *(f".{name}" for name in contents)):
        module = ModuleType(f"dm_control{name}")
        vars(module).update(contents.get(name[1:], {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    quicken.__wrapped__()

    Physics().step(3)
    assert steps == [3]
    assert FieldIndexer()._convert_key("torso") == "torso"
    sys.modules["dm_control.utils.rewards"].tolerance(0.5)
    assert scored == [0.5]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_the_switch_of_accelerators_keeps_the_functions(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = ModuleType("dm_control.utils.rewards")
    vars(rewards).update(tolerance=abs, _sigmoids=None, _DEFAULT_VALUE_AT_MARGIN=0.1)
    modules = {"dm_control": ModuleType("dm_control"), "dm_control.utils": ModuleType("dm_control.utils")}
    vars(modules["dm_control.utils"]).update(rewards=rewards)
    for name, module in (modules | {rewards.__name__: rewards}).items():
        monkeypatch.setitem(sys.modules, name, module)
    with accelerating(mode):
        quicken.__wrapped__()
    assert (rewards.tolerance is abs) == (mode == "off")
