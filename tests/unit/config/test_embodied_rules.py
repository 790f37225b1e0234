"""Kinds of policies and pixels: what is refused and why, and the neighbours that pass."""

from __future__ import annotations

import pytest

VLA = [
    "actor.model.type=vla",
    "actor.model.path=folder",
    "actor.model.instruction=reach",
]
CNN = "actor.model.type=cnn"
PIXELS = ["env.pixels={width: 48}", "env.num_workers=2"]
RANDOM = "actor.model.random_init={}"

OPEN, CLOSE = "{name: open, instruction: open it}", "{name: close, instruction: close it}"
TASKS = [VLA[0], VLA[1], f"env.tasks=[{OPEN}, {CLOSE}]"]

REFUSED = [
    ("embodied", ["actor.model.type=rnn"], "actor.model.type", "not one of the allowed"),
    ("embodied", ["actor.model.log_std=learned"], "actor.model.log_std", "not one of the allowed"),
    ("embodied", ["actor.model.action_distribution=beta"], "actor.model.action_distribution", "not one of the allowed"),
    ("embodied", ["actor.model.cnn={}"], "actor.model.cnn", "mlp has no convolutions"),
    ("embodied", [CNN, "actor.model.cnn={channels: [8, 8]}"], "actor.model.cnn", "2 channels, 3 kernels"),
    ("embodied", [CNN, "actor.model.cnn={strides: [4, 2, 0]}"], "actor.model.cnn.strides[2]", "out of range"),
    ("embodied", [CNN, "actor.model.cnn={filters: [8]}"], "actor.model.cnn.filters", "unknown key"),
    ("embodied", ["actor.model.path=folder"], "actor.model.path", "mlp is no language model"),
    ("embodied", [CNN, "actor.model.instruction=reach"], "actor.model.instruction", "cnn is no language model"),
    ("embodied", ["actor.model.action_bins=9"], "actor.model.action_bins", "no language model"),
    ("embodied", ["actor.model.train_backbone=false"], "actor.model.train_backbone", "no language model"),
    ("embodied", ["actor.gradient_checkpointing=true"], "actor.gradient_checkpointing", "no layers"),
    ("embodied", ["env.pixels={}"], "env.num_workers", "processes of their own"),
    ("embodied", [*PIXELS, "env.pixels.width=4"], "env.pixels.width", "out of range"),
    ("embodied", [*PIXELS, "env.pixels.frame_stack=0"], "env.pixels.frame_stack", "out of range"),
    ("embodied", [*PIXELS, "env.pixels.with=4"], "env.pixels.with", "unknown key"),
    ("embodied", [*PIXELS, "env.normalize_observations=true"], "env.normalize_observations", "divided by 255"),
    ("embodied", [*PIXELS, "env.clip_observations=5"], "env.clip_observations", "divided by 255"),
    ("embodied", [*VLA, "actor.model.instruction=null"], "actor.model.instruction", "reads an instruction"),
    ("embodied", [*VLA, RANDOM, "actor.model.tokenizer=bytes"], "actor.model", "both are set"),
    ("embodied", [VLA[0], VLA[2]], "actor.model", "neither is set"),
    ("embodied", [VLA[0], VLA[2], RANDOM], "actor.model.tokenizer", "no tokenizer of its own"),
    ("embodied", [*VLA, "actor.model.num_action_chunks=2"], "actor.model.num_action_chunks", "one action at a time"),
    ("embodied", [*VLA, "algorithm.logprob_type=token_level"], "algorithm.logprob_type", "one log-prob"),
    ("embodied", [*VLA, "algorithm.entropy_type=token_level"], "algorithm.entropy_type", "one entropy"),
    ("embodied", [*VLA, "actor.model.hidden_sizes=[8]"], "actor.model.hidden_sizes", "chooses bins"),
    ("embodied", [*VLA, "actor.model.log_std=state"], "actor.model.log_std", "chooses bins"),
    ("embodied", [*VLA, "actor.model.action_bins=1"], "actor.model.action_bins", "out of range"),
    ("embodied", ["actor.lora={}"], "actor.lora", "no language model"),
    ("embodied", ["env.backend=warp"], "env.backend", "not one of the allowed"),
    ("embodied", ["env.backend=mujoco_warp", "env.num_workers=2"], "env.num_workers", "all environments of one task"),
    ("embodied", ["env.backend=mujoco_warp", "env.tasks=[{name: a}]"], "env.tasks", "all environments of one task"),
    ("embodied", [*TASKS, VLA[2]], "actor.model.instruction", "an instruction of its own"),
    ("embodied", [VLA[0], VLA[1], f"env.tasks=[{OPEN}, {{name: b}}]"], "env.tasks[1].instruction", "of each task"),
    ("embodied", [CNN, f"env.tasks=[{OPEN}, {{name: b}}]"], "env.tasks[0].instruction", "cnn reads no instruction"),
    ("embodied", ["env.tasks=[{name: a}, {name: a}]"], "env.tasks[1].name", "a task a already"),
    ("embodied", ["env.tasks=[{name: a b}]"], "env.tasks[0].name", ""),
    ("embodied", ["env.tasks=[{kwargs: {}}]"], "env.tasks[0].name", "required"),
    ("embodied", ["env.tasks=[{name: a, goal: 1}]"], "env.tasks[0].goal", "unknown key"),
    ("embodied", [*TASKS, "env.evaluation.episodes=3"], "env.evaluation.episodes", "an equal number of 3 episodes"),
    (
        "embodied",
        ["env.tasks=[{name: a}, {name: b}, {name: c}]", "env.evaluation.episodes=3"],
        "env.num_envs",
        "evenly",
    ),
    (
        "embodied",
        [*VLA, "actor.lora={}", "actor.model.train_backbone=true"],
        "actor.model.train_backbone",
        "in place of",
    ),
    *(
        ("reasoning", [f"actor.model.{key}"], f"actor.model.{key.partition('=')[0]}", "only embodied")
        for key in ("type=cnn", "log_std=state", "action_distribution=squashed", "instruction=a", "action_bins=9")
    ),
]

PASSES = [
    ["env.backend=mujoco_warp"],
    TASKS,
    ["env.tasks=[{name: a, kwargs: {frame_skip: 2}}, {name: b}]"],
    ["actor.model.log_std=state", "actor.model.action_distribution=squashed"],
    ["actor.model.action_distribution=squashed", "actor.model.num_action_chunks=2"],
    [CNN],
    [CNN, *PIXELS, "actor.model.log_std=state", "actor.model.num_action_chunks=2"],
    [*PIXELS],
    [*VLA, *PIXELS, "actor.gradient_checkpointing=true", "actor.model.train_backbone=false", "actor.model.cnn={}"],
    [*VLA, *PIXELS, "actor.lora={rank: 4}"],
    [VLA[0], VLA[2], RANDOM, "actor.model.tokenizer=bytes", "actor.model.action_bins=5"],
]


@pytest.mark.parametrize(("task", "overrides", "key", "reason"), REFUSED)
def test_refused(task: str, overrides: list[str], key: str, reason: str, problems) -> None:
    reported = problems(task, *overrides)
    assert list(reported) == [key]
    assert reason in str(reported[key])


@pytest.mark.parametrize("overrides", PASSES)
def test_passes(overrides: list[str], problems) -> None:
    assert problems("embodied", *overrides) == {}
