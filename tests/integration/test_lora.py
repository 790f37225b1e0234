"""A run that trains adapters: through the command, with what it publishes, saves, resumes and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_platform.checkpoint.verify import Checkpoint

SMALL = "{rank: 4, alpha: 8, target_modules: [q_proj, v_proj, down_proj]}"
LORA = (f"actor.lora={SMALL}", f"critic.lora={SMALL}", "actor.optim.lr=1e-2", "critic.optim.lr=1e-2")
KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1")


def test_a_run_with_adapters(command, final_state, logged, folder: Path, scored: str) -> None:
    ended = command("reasoning.yaml", scored, *LORA, *KL, "runner.max_steps=3")
    assert ended.code == 0, ended.err
    saved = final_state("out", 3)
    for role in ("actor", "critic"):
        heads = {"model.head.weight", "model.head.bias"} if role == "critic" else set()
        names = set(saved[role]["model"])
        assert {name for name in names if ".lora_" not in name} == heads
        assert {name.rpartition(".")[0] for name in saved[role]["optimizer"]} == names
    steps = [row for row in logged("out") if "reward/kl" in row]
    assert steps[0]["reward/kl"] == pytest.approx(0.0, abs=1e-6)  # new adapters change nothing
    assert all(abs(row["reward/kl"]) > 1e-6 for row in steps[1:])
    # the exported folder holds the plain names, and its targeted matrices have moved, no others
    command("reasoning.yaml", *LORA, "runner.max_steps=1", "actor.optim.lr=1e-30", "runner.output_dir=unmoved")
    end, start = (load_file(folder / name / "model" / "model.safetensors") for name in ("out", "unmoved"))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert end.keys() == start.keys()
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj", "down_proj"}


def test_a_kl_over_the_whole_vocabulary(command, logged, scored: str) -> None:
    full = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full", "algorithm.use_kl_loss=true")
    both = ("algorithm.kl_loss_type=full", "algorithm.allow_both_kl=true", "runner.max_steps=3")
    ended = command("reasoning.yaml", scored, *LORA, *full, *both)
    assert ended.code == 0, ended.err
    found = [row["reward/kl"] for row in logged("out") if "reward/kl" in row]
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert min(found[1:]) > 1e-6


def test_a_run_that_was_stopped(assert_ends_the_same_if_stopped, scored: str) -> None:
    assert_ends_the_same_if_stopped("reasoning.yaml", scored, *LORA, *KL)


def test_a_checkpoint_of_other_adapters_is_refused(command, folder: Path) -> None:
    assert command("reasoning.yaml", *LORA, "runner.max_steps=1").code == 0
    assert list(Checkpoint.open(folder / "out" / "checkpoints" / "step-00000001").parts)
    for other in ("actor.lora.rank=2", "runner.seed=9"):
        ended = command("reasoning.yaml", *LORA, "runner.max_steps=2", other)
        assert ended.code != 0
        assert other.partition("=")[0].rpartition(".")[0] in ended.err
