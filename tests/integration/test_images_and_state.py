"""Images among other parts of an observation: a policy that needs both learns from both; misfits are refused."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.errors import DataError
from rl_platform.launch.saved.loaded_policy import load_policy
from rl_platform.launch.tools.export import PolicyGraph
from rl_platform.metrics import read_metrics

# The rewarded action is 1 for a bright picture and 0 for a dark one, or the reverse if the sign is negative.
SIGNALS = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Dict, Discrete

class Signal(gymnasium.Env):
    observation_space = Dict({"arm": Box(-9, 9, (2,)), "camera": Box(0, 255, (12, 12, 3), np.uint8)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bright, self.positive = self.np_random.integers(2, size=2).tolist()
        arm = np.array([4.0 if self.positive else -4.0, 1.0], np.float32)
        return {"arm": arm, "camera": np.full((12, 12, 3), 50 + 150 * self.bright, np.uint8)}, {}

    def step(self, action):
        reward = float(action == (self.bright if self.positive else 1 - self.bright))
        return self.reset()[0], reward, False, False, {}

gymnasium.register("Signal-v0", Signal, max_episode_steps=10)

class Parts(gymnasium.Env):
    observation_space = Dict(
        {"arm": Box(-9, 9, (2,)), "camera": Box(0, 255, (12, 12, 3), np.uint8), "tool": Discrete(3)}
    )
    action_space = Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        draw = self.np_random
        camera = draw.integers(256, size=(12, 12, 3), dtype=np.uint8)
        return {"arm": draw.uniform(-9, 9, 2).astype(np.float32), "camera": camera, "tool": draw.integers(3)}, {}

    def step(self, action):
        return self.reset()[0], float(action[0]), False, False, {}

gymnasium.register("Parts-v0", Parts, max_episode_steps=10)
"""
WINDOWS = "{channels: [16, 16], kernels: [4, 3], strides: [3, 2]}"
CNN = f"actor.model={{type: cnn, cnn: {WINDOWS}, hidden_sizes: [64], activation: relu}}"
ENV = "env.id=signals:Signal-v0"


@pytest.fixture(autouse=True)
def signals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "signals.py").write_text(SIGNALS)
    monkeypatch.syspath_prepend(folder)


def test_pixels_are_divided_and_numbers_normalised() -> None:
    spaces = inspect_env(EnvDescription("signals:Signal-v0")).spaces
    assert not spaces.images
    assert [(part.name, part.size, part.numbers, part.image) for part in spaces.parts] == [
        ("arm", 2, True, False),
        ("camera", 432, False, True),
    ]
    assert spaces.normalized == (True, True, *[False] * 432)


def test_a_policy_learns_what_neither_part_says_alone(command) -> None:
    settings = [
        ENV,
        CNN,
        "env.num_workers=2",
        "env.num_envs=16",
        "env.rollout_steps=32",
        "env.evaluation.episodes=16",
        "data.mini_batch_size=128",
        "algorithm.ppo_epochs=4",
        "algorithm.gamma=0",
        "actor.optim.lr=0.003",
        "runner.max_steps=25",
        "runner.val_check_interval=25",
    ]
    ended = command("embodied.yaml", *settings, "runner.output_dir=out")
    assert ended.code == 0, ended.err
    rows = read_metrics("out")
    returns = [row["episode/return"] for row in rows if "episode/return" in row]
    assert returns[0] < 7  # a policy of the picture or of the sign alone has 5
    assert rows[-1]["val/return"] > 9.5
    policy = load_policy("out/model")
    for positive in (1, -1):
        for bright in (0, 1):
            camera = np.full((12, 12, 3), 50 + 150 * bright, np.uint8)
            arm = np.array([4.0 * positive, 1.0], np.float32)
            action = policy.act({"arm": arm, "camera": camera}, True)
            assert action == (bright if positive > 0 else 1 - bright)


def test_joined_parts_are_those_of_gymnasium_for_loaded_and_exported_policies(command) -> None:
    """An evaluation's return is that of the loaded policy, to the last bit."""
    settings = ["env.id=signals:Parts-v0", CNN, "runner.max_steps=1", "runner.output_dir=out"]
    ended = command("embodied.yaml", *settings, "env.evaluation.episodes=1")
    assert ended.code == 0, ended.err
    policy, env = load_policy("out"), gymnasium.make("signals:Parts-v0")
    observation, _ = env.reset(seed=10_000)
    rows, actions, total = [], [], 0.0
    for _ in range(10):
        rows.append(gymnasium.spaces.flatten(env.observation_space, observation))
        actions.append(policy.act(rows[-1]))
        observation, reward, *_ = env.step(actions[-1])
        total += float(reward)
    assert read_metrics("out")[-1]["val/return"] == total
    with torch.no_grad():
        exported = PolicyGraph(policy.saved)(torch.from_numpy(np.stack(rows).astype(np.float32)))
    np.testing.assert_allclose(exported, np.stack(actions), rtol=1e-4, atol=1e-6)
    with pytest.raises(DataError, match=r"whole numbers from 0 to 255"):
        policy.act(rows[0] / 255)


@pytest.mark.parametrize(
    "model",
    [
        "{type: mlp}",
        "{type: gru}",
        "{type: vla, random_init: {}, tokenizer: bytes, instruction: go}",
        "{type: pi0, random_init: {}, tokenizer: bytes, instruction: go}",
    ],
)
def test_other_policies_are_refused_with_the_line_to_type(model: str, command) -> None:
    ended = command("embodied.yaml", ENV, f"actor.model={model}")
    assert ended.code == 2, ended.err
    assert "images among other parts (camera), which" in ended.err
    assert "hint: actor.model.type: cnn" in ended.err
    assert not Path("out").exists()
