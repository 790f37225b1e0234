"""Runs with every kind of embodied policy: keys act, misfits are refused, stopped runs go on, images are learned."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.engines.training.state_files import read_whole
from rl_platform.launch.saved.loaded_policy import load_policy
from rl_platform.metrics import read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
CHEETAH = ("env.id=HalfCheetah-v5", "env.max_episode_steps=7", "actor.model.initial_log_std=-1")
SQUASHED = (*CHEETAH, "actor.model.action_distribution=squashed")
PENDULUM = (
    "env.id=InvertedPendulum-v5",
    "env.max_episode_steps=8",
    "env.pixels={width: 24, height: 24, frame_stack: 2, grayscale: true}",
    "env.num_workers=1",
    "env.evaluation.episodes=1",
)
SMALL_CNN = "{channels: [4, 8], kernels: [4, 3], strides: [3, 2]}"
# Four channels are all dead after one initialisation in sixteen; the picture then has no influence.
LEARNING_CNN = "{channels: [16, 16], kernels: [4, 3], strides: [3, 2]}"
CNN = (*PENDULUM, f"actor.model={{type: cnn, cnn: {SMALL_CNN}, hidden_sizes: [16]}}")
TINY = "{hidden_size: 16, num_layers: 2, num_heads: 2, intermediate_size: 32, max_positions: 64}"
VLA = (
    "env.id=shades:Shade-v0",
    f"actor.model={{type: vla, cnn: {SMALL_CNN}, random_init: {TINY}, tokenizer: bytes, instruction: follow}}",
)
SHADE = """
import gymnasium, numpy as np

class Shade(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)

    def __init__(self, discrete=False):
        self.action_space = gymnasium.spaces.Discrete(2) if discrete else gymnasium.spaces.Box(0, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bright = int(self.np_random.integers(2))
        return np.full((12, 12, 3), 50 + 150 * self.bright, np.uint8), {}

    def step(self, action):
        reward = 1 - abs(float(np.sum(action)) - self.bright)
        return self.reset()[0], reward, False, False, {}

gymnasium.register("Shade-v0", Shade, max_episode_steps=10)
"""
_before: dict[tuple[str, ...], dict] = {}  # what runs without the key have learned


@pytest.fixture(autouse=True)
def shades(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of images whose reward is 1 for an action as bright as its picture, in module shades."""
    (folder / "shades.py").write_text(SHADE)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def learned(command, request: pytest.FixtureRequest):
    """learned("key=value"): what the actor's checkpoint holds after the last step."""

    def run(*overrides: str, steps: int = 1, folder: str = "out") -> dict:
        if overrides[: len(PENDULUM)] == PENDULUM:
            request.getfixturevalue("drawing")
        ended = command("embodied.yaml", f"runner.max_steps={steps}", f"runner.output_dir={folder}", *overrides)
        assert ended.code == 0, ended.err
        assert ended.err == ""
        assert all(math.isfinite(value) for row in read_metrics(folder) for value in row.values())
        return read_whole(Checkpoint.open(Path(folder) / "checkpoints" / f"step-{steps:08d}").file("actor"))

    return run


@pytest.mark.parametrize(
    ("before", "key"),
    [
        (CHEETAH, "actor.model.log_std=state"),
        (CHEETAH, "actor.model.action_distribution=squashed"),
        (SQUASHED, "algorithm.entropy_bonus=0.1"),
        (CNN, "env.pixels.frame_stack=1"),
        (CNN, "env.pixels.grayscale=false"),
        (CNN, "actor.model.cnn.channels=[4, 4]"),
        (VLA, "actor.model.action_bins=5"),
        (VLA, "actor.model.instruction=flee"),
        (VLA, "actor.model.train_backbone=false"),
        (VLA, "actor.lora={rank: 2}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_key_has_an_effect(before: tuple[str, ...], key: str, learned, differences) -> None:
    if before not in _before:
        _before[before] = learned(*before, folder="before")
    assert differences(_before[before], learned(*before, key))


@pytest.mark.parametrize("key", ["actor.model.train_backbone=false", "actor.lora={rank: 2}"])
def test_a_checkpoint_with_a_part_of_the_weights_gives_the_policy_of_the_model_folder(key: str, learned) -> None:
    learned(*VLA, key, "actor.optim.lr=0.05")
    checkpoint, left = load_policy("out"), load_policy("out/model")
    assert checkpoint.saved.description == left.saved.description
    assert checkpoint.saved.weights.keys() == left.saved.weights.keys()
    assert all(torch.equal(tensor, left.saved.weights[name]) for name, tensor in checkpoint.saved.weights.items())
    images = np.arange(4 * 12 * 12 * 3, dtype=np.uint8).reshape(4, 12, 12, 3)
    np.testing.assert_array_equal(checkpoint.act(images, False), left.act(images, False))


@pytest.mark.parametrize(
    "kind",
    [(*SQUASHED, "actor.model.log_std=state"), CNN, (*VLA, "actor.model.train_backbone=false")],
    ids=["squashed", "cnn", "vla"],
)
def test_a_run_that_was_stopped(kind: tuple[str, ...], learned, differences) -> None:
    whole = learned(*kind, steps=2, folder="whole")
    learned(*kind, steps=1, folder="parts")
    assert differences(whole, learned(*kind, steps=2, folder="parts")) == []


def test_recomputed_layers_change_nothing(learned) -> None:
    plain = learned(*VLA, folder="before")
    saving = learned(*VLA, "actor.gradient_checkpointing=true", "actor.micro_batch_size=8")
    for name, tensor in plain.items():
        torch.testing.assert_close(saving[name], tensor, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("actor.model.action_distribution=squashed",), "actor.model.action_distribution"),
        (("actor.model.log_std=state",), "actor.model.log_std"),
        (("actor.model.type=cnn",), "actor.model.type"),
        (("env.pixels={}", "env.num_workers=2"), "env.pixels"),
        ((*CNN, "actor.model.cnn={}"), "actor.model.cnn"),
        ((*CNN, "env.pixels.camera=front"), "env.pixels.camera"),
    ],
)
def test_what_the_environment_does_not_allow_is_refused_with_the_key(overrides, key: str, command) -> None:
    ended = command("embodied.yaml", *overrides)
    assert ended.code == 2
    assert f" {key}: " in f" {ended.err}".replace("\n", " ")
    assert not Path("out").exists()


@pytest.mark.parametrize("key", ["log_std=state", "action_distribution=squashed"])
def test_a_checkpoint_of_another_policy_is_refused(key: str, command) -> None:
    assert command("embodied.yaml", *CHEETAH, "runner.max_steps=1").code == 0
    ended = command("embodied.yaml", *CHEETAH, f"actor.model.{key}", "runner.max_steps=2")
    assert ended.code != 0
    assert f"actor.model.{key.partition('=')[0]}" in ended.err


@pytest.mark.parametrize(
    "model",
    [
        f"actor.model={{type: cnn, cnn: {LEARNING_CNN}, hidden_sizes: [16]}}",
        f"actor.model={{type: vla, cnn: {LEARNING_CNN}, random_init: {TINY}, tokenizer: bytes, instruction: follow}}",
    ],
    ids=["cnn", "vla"],
)
def test_images_are_learned_and_a_note_tells_what_becomes_of_them(model: str, command) -> None:
    bandit = ("env.id=shades:Shade-v0", "env.kwargs={discrete: true}", "algorithm.gamma=0")
    slow = ("actor.optim={lr: 1.0e-3, lr_schedule: linear}", "algorithm.entropy_bonus=0.1", "env.rollout_steps=32")
    ended = command("embodied.yaml", *bandit, model, *slow, "runner.max_steps=30")
    assert ended.code == 0, ended.err
    assert "observations are images, which the model divides by 255 instead" in ended.out
    rows = read_metrics("out")
    returns = [row["episode/return"] for row in rows if "episode/return" in row]
    assert returns[0] < 7  # of 10; 5 by chance
    assert rows[-1]["val/return"] == 10


@pytest.mark.release  # that images are learned, and a run with drawn pictures, are tested always: see above
def test_a_pole_is_balanced_from_pictures(start, folder: Path, drawing) -> None:
    """The beginning of a run that ends at the longest episodes there are. Without learning, 20 steps stay below 11."""
    (folder / "balanced.py").write_text("def stop(step, metrics):\n    return metrics.get('episode/return', 0) > 20\n")
    short = "runner.max_steps=20", "runner.trace_steps=0", "env.evaluation.episodes=1"
    short = *short, "runner.callbacks=[balanced:stop]"
    process = start(CONFIGS / "embodied" / "pixels.yaml", "runner.output_dir=out", *short)
    _, errors = process.communicate(timeout=550)
    assert process.returncode == 0, errors
    assert errors == ""
    returns = [row["episode/return"] for row in read_metrics(folder / "out") if "episode/return" in row]
    assert returns[0] < 12
    assert returns[-1] > 20


SIGN = """
import gymnasium, numpy as np

class Sign(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, wanted, size=12):
        self.wanted, self.observation_space = wanted, gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.picture = np.full((size, size, 3), 100, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.picture, {}

    def step(self, action):
        right = int(action == self.wanted)
        return self.picture, float(right), False, False, {"success": right}

gymnasium.register("Sign-v0", Sign, max_episode_steps=10)
"""
LEFT, RIGHT = (
    f"{{name: {name}, instruction: go {name}, kwargs: {{wanted: {wanted}}}}}"
    for wanted, name in enumerate(("left", "right"))
)
TOLD = (
    "env.id=signs:Sign-v0",
    f"actor.model={{type: vla, cnn: {SMALL_CNN}, random_init: {TINY}, tokenizer: bytes}}",
    f"env.tasks=[{LEFT}, {RIGHT}]",
)


@pytest.fixture
def signs(folder: Path) -> None:
    """An environment whose picture does not tell which of two actions is wanted, in module signs."""
    (folder / "signs.py").write_text(SIGN)


def test_each_task_is_learned_by_its_instruction_alone(signs: None, command) -> None:
    bandit = ("algorithm.gamma=0", "algorithm.entropy_bonus=0.1", "actor.optim={lr: 1.0e-3, lr_schedule: linear}")
    length = ("runner.max_steps=30", "env.rollout_steps=32", "env.num_workers=2")
    ended = command("embodied.yaml", *TOLD, *bandit, *length)
    assert ended.code == 0, ended.err
    rows = read_metrics("out")
    first, last = (row for row in (rows[0], rows[-1]) if "val/return" in row)
    assert first["val/left/return"] + first["val/right/return"] == 10  # the same choice for both
    for task in ("left", "right"):
        assert last[f"val/{task}/return"] == 10
        assert last[f"val/{task}/success_at_end"] == last[f"val/{task}/success_once"] == 1
        assert last[f"env/{task}/return"] > 5
    ended = command("--eval", "out", "env.evaluation.episodes=6", "env.evaluation.video=false")
    assert ended.code == 0, ended.err
    table = [line.split()[:5] for line in ended.out.splitlines() if "deterministic" in line]
    assert table == [
        ["signs:Sign-v0", "deterministic", "6", "0", "10.0"],
        ["left", "deterministic", "3", "0", "10.0"],
        ["right", "deterministic", "3", "0", "10.0"],
    ]


def test_a_run_of_several_tasks_that_was_stopped(signs: None, learned, differences) -> None:
    whole = learned(*TOLD, steps=2, folder="whole")
    learned(*TOLD, steps=1, folder="parts")
    assert differences(whole, learned(*TOLD, steps=2, folder="parts")) == []
    texts = [[row for row in read_metrics(folder) if row["step"] == 2] for folder in ("whole", "parts")]
    names = [name for name in texts[0][0] if name.startswith(("env/", "val/"))]
    assert "env/left/return" in names
    assert [texts[0][0][name] for name in names] == [texts[1][0][name] for name in names]


def test_tasks_with_other_pictures_are_refused(signs: None, command) -> None:
    larger = RIGHT.replace("wanted: 1", "wanted: 1, size: 16")
    ended = command("embodied.yaml", *TOLD, f"env.tasks=[{LEFT}, {larger}]")
    assert ended.code == 2
    assert "env.tasks[1].kwargs: task right has other spaces than left" in ended.err.replace("\n", " ")
