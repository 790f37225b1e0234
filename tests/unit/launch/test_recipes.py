"""Configs for clusters with many GPUs: they plan without GPU, network or model, and say what a start misses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "configs" / "reasoning"
GSM8K, DAPO = RECIPES / "qwen2.5_1.5b_gsm8k_8gpu.yaml", RECIPES / "deepseek_r1_7b_dapo_64gpu.yaml"
recipes = pytest.mark.parametrize(("path", "gpus", "share"), [(GSM8K, 8, 2), (DAPO, 64, 4)], ids=["gsm8k", "dapo"])
ON_THIS_CPU = "cluster={component_placement: {'actor,critic': 'all:0-1', 'rollout,reward': all}}"


@recipes
def test_they_plan_and_fit(command, monkeypatch: pytest.MonkeyPatch, folder: Path, path, gpus: int, share: int) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))  # the models are known without their files
    tree = json.loads(command(path, "--plan=json").out)
    assert sum(device["gpu"] is not None for device in tree["devices"]) == gpus
    assert tree["warnings"] == []
    for device in (device for device in tree["devices"] if device["gpu"] is not None):
        assert 0.2 < device["memory_bytes"]["peak"] / device["capacity_bytes"] < 0.9
    phases = {phase["phase"] for phase in tree["step"]["phases"]}
    assert {"generate", "log-probs", "values", "train critic", "train actor"} <= phases
    (batch,) = (each for each in tree["batches"] if each["component"] == "actor")
    assert batch["together"] == share
    assert batch["even"]


@pytest.mark.parametrize(("path", "cluster"), [(GSM8K, [ON_THIS_CPU]), (DAPO, [])], ids=["gsm8k", "dapo"])
def test_a_start_without_their_questions_says_what_to_write(command, path: Path, cluster: list[str]) -> None:
    ended = command(path, *cluster, "runner.output_dir=out")
    assert ended.code == 65, ended.err
    assert "_train.jsonl: cannot be read: No such file or directory" in ended.err
    assert "one JSON object per line with the fields 'question' and 'answer'" in ended.err
    assert not Path("out").exists()


def test_a_start_without_gpus_says_what_to_replace(command) -> None:
    ended = command(GSM8K, "runner.output_dir=out")
    assert ended.code == 2
    assert "cluster.inventory: GPU 7 is used, but torch sees none" in ended.err
    assert "cluster={component_placement: {...}}" in ended.err


def test_a_start_without_the_model_says_how_to_get_it(command, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    for name, number in (("train", 1), ("test", 2)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": f"{number} + 1?", "answer": f"#### {number}"}))
    files = "data.task.path=train.jsonl", "data.task.val_path=test.jsonl"
    ended = command(GSM8K, ON_THIS_CPU, "runner.output_dir=out", *files)
    assert ended.code == 2
    assert "actor.model.path" in ended.err
    assert "hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir FOLDER; then actor.model.path=FOLDER" in ended.err
