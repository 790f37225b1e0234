"""Runs of estimators that need no critic: none is built, no phase waits for one, the actor still learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

KEYS = ["{adv_type: grpo, group_size: 4}", "{adv_type: reinforce_plus_plus}", "{adv_type: 'mine:zero'}"]


@pytest.mark.parametrize("algorithm", KEYS)
def test_run(command, folder: Path, final_state, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    (folder / "mine.py").write_text("def zero(batch, algorithm):\n    return batch.rewards * 0, None\n")
    monkeypatch.syspath_prepend(folder)
    overrides = ["runner.max_steps=2", f"algorithm={algorithm}", "critic={use_critic_model: false}"]
    ended = command("reasoning.yaml", *overrides, "cluster.component_placement={'actor,rollout,reward': all}")
    assert ended.code == 0, ended.err
    assert "none: there is no critic" in ended.out
    for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
        names = json.loads(line).keys()
        assert not [name for name in names if "critic" in name or name == "time/values"]
    parts = final_state("out", 2)
    assert "critic" not in parts
    tensors = [tensor for tensor in parts["actor"]["model"].values() if isinstance(tensor, torch.Tensor)]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


def test_an_estimator_that_cannot_be_imported_is_told_before_anything_starts(command, folder: Path) -> None:
    overrides = ["algorithm={adv_type: 'nowhere:estimate'}", "critic={use_critic_model: false}"]
    ended = command("reasoning.yaml", *overrides, "cluster.component_placement={'actor,rollout,reward': all}")
    assert ended.code == 2
    assert "algorithm.adv_type: cannot be imported: ModuleNotFoundError" in ended.err
    assert not (folder / "out").exists()
