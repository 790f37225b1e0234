"""On a GPU: a reward model lives on the accelerator of its rank and scores as it does on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reward_parts import make_classifier

from rl_platform.components.reward import LanguageReward
from rl_platform.config.schema import Config
from rl_platform.records import Prompt, Trajectory
from rl_platform.runtime.host import ComponentContext

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def scores(folder: Path, accelerators: tuple[int, ...]) -> tuple[list[float], Any]:
    """Of four responses, and where the model is."""
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
        reward={"type": "model", "max_batch_size": 2, "model": {"path": str(folder)}},
    )
    context = ComponentContext(name="reward", rank=0, world_size=1, accelerators=accelerators, seed=1)
    component = LanguageReward(context, config)
    texts = ("short", "a longer one", "!", "the longest of all of them")
    found = component.score([Trajectory(Prompt(0, "?", "", (1,)), 0, (1,), (0.0,), "stop", 0, text) for text in texts])
    where = next(component._scorer._classifier._network.parameters()).device
    component.close()
    return [trajectory.reward for trajectory in found], where


def test_it_scores_on_its_gpu_what_it_scores_on_the_cpu(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    on_cpu, on_gpu = scores(tmp_path, ()), scores(tmp_path, (0,))
    assert on_gpu[1] == torch.device("cuda", 0)
    assert on_gpu[0] == pytest.approx(on_cpu[0], abs=1e-4)
