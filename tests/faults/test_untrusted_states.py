"""The state of an environment that holds a class of its own is loaded only if the user trusts the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

ENVIRONMENT = """
import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

class Memory:
    pass

class Remembering(CartPoleEnv):
    def __init__(self, **options):
        super().__init__(**options)
        self.memory = Memory()

gymnasium.register("Remembering-v0", "remembering:Remembering", max_episode_steps=50)
"""


def test_a_class_of_an_environment_needs_trust(command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "remembering.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(folder)
    run = ("embodied.yaml", "env.id=remembering:Remembering-v0", "env.evaluation.episodes=1")
    ended = command(*run, "runner.max_steps=1")
    assert ended.code == 0, ended.err
    assert "holds remembering.Memory, which may run code" in ended.out + ended.err
    ended = command(*run, "runner.max_steps=2")
    assert ended.code == 65, ended.err
    assert "env.pt: the state of environment 0 holds remembering.Memory" in ended.err
    assert "runner.trust_checkpoint=true" in ended.err
    ended = command(*run, "runner.max_steps=2", "runner.trust_checkpoint=true")
    assert ended.code == 0, ended.err
