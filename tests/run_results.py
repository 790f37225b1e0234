"""What tests of whole runs compare: everything that two runs left behind, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.engines.training.state_files import read_whole
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv


def final_state(output_dir: str | Path, step: int, backend: str = "mujoco") -> dict[str, Any]:
    """The parts of the checkpoint of this step, by name, with environments of `env.backend` as their future.

    What a learner saved is under "model" and "optimizer".
    """
    checkpoint = Checkpoint.open(Path(output_dir) / "checkpoints" / f"step-{step:08d}")
    parts = {
        name: _grouped(read_whole(checkpoint.file(name))) if checkpoint.file(name).is_dir() else checkpoint.load(name)
        for name in checkpoint.parts
    }
    if "env" in parts:
        parts["env"]["envs"]["envs"] = _future(parts["env"]["envs"], backend)
    return parts


def logged(output_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics and samples, without what depends on the clock."""
    texts = [(Path(output_dir) / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    return [{name: row[name] for name in row if not name.startswith(("time/", "perf/"))} for row in rows]


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """The paths at which two nested states are not equal bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [path]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [place for key in first for place in differences(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [place for index, (a, b) in pairs for place in differences(a, b, f"{path}/{index}")]
    return [] if type(first) is type(second) and first == second else [path]


def _grouped(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """`model.NAME` and `optimizer.NAME.KEY` as dicts of their first word."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = tensor
    return groups


def _future(state: dict[str, Any], backend: str) -> list[torch.Tensor]:
    """What the environments answer to fixed actions from `state` on, through ends of episodes and resets.

    Their saved bytes are no fit comparison: equal simulations may be written in different ways.
    """
    envs = VectorEnv(EnvDescription(state["id"], max_episode_steps=20, backend=backend), state["num_envs"])
    envs.load_state_dict(state)
    draw = np.random.default_rng(0)
    answers = []
    for _ in range(50):
        if envs.action_space.kind == "discrete":
            actions = draw.integers(envs.action_space.size, size=envs.num_envs)
        elif envs.action_space.kind == "multi_discrete":
            actions = draw.integers(envs.action_space.choices, size=(envs.num_envs, len(envs.action_space.choices)))
        else:
            actions = draw.normal(size=(envs.num_envs, envs.action_space.size)).astype(np.float32)
        result = envs.step(actions)
        answers += [torch.from_numpy(result.observations), torch.from_numpy(result.rewards)]
    envs.close()
    return answers
