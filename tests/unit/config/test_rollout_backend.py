"""What `rollout.backend: auto` stands for, and why."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import Any

import pytest

from rl_platform.config.rollout_backend import chosen_backend, may_go_by_group


@pytest.mark.parametrize(
    ("asked", "on_gpu", "installed", "chosen", "why"),
    [
        ("auto", True, True, "sglang", "there are GPUs and sglang is installed"),
        ("auto", True, False, "torch", "sglang is not installed"),
        ("auto", False, True, "torch", "on a CPU it is faster than sglang"),
        ("sglang", False, True, "sglang", "as the config says"),
        ("torch", True, True, "torch", "as the config says"),
    ],
)
def test_choice(
    asked: str, on_gpu: bool, installed: bool, chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    engines = {"sglang": object() if installed else None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: engines[name] if name in engines else find(name))
    assert chosen_backend(asked, on_gpu) == (chosen, why)


@pytest.mark.parametrize("left", [None, importlib.machinery.ModuleSpec("sglang", None)], ids=["nothing", "cache"])
def test_a_removed_folder_is_not_chosen(left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"sglang": object(), "rl_platform.engines.rollout.sglang": left}
    monkeypatch.setattr(importlib.util, "find_spec", engines.__getitem__)
    assert chosen_backend("auto", True) == ("torch", "platform/engines/rollout/sglang was removed")


def test_who_offers_weights_to_a_process_group(load: Any) -> None:
    asked = "rollout.weight_transfer=group"
    for backend in ("rollout.backend=sglang", "rollout.backend=torch"):
        for on_gpu in (False, True):
            assert may_go_by_group(load("reasoning", backend).config, on_gpu) == on_gpu
            assert may_go_by_group(load("reasoning", backend, asked).config, on_gpu)
        for override in ("rollout.sync=delta", "rollout.weight_transfer=memory"):
            assert not may_go_by_group(load("reasoning", backend, override).config, on_gpu=True)
    assert not may_go_by_group(load("reasoning", "rollout.backend=vllm").config, on_gpu=True)
    assert not may_go_by_group(load("embodied").config, on_gpu=True)
