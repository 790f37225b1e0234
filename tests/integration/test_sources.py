"""Several sources of questions and reward functions: a stopped run ends as a whole one, with metrics of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def sources(folder: Path) -> str:
    lines = [json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(9)]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    (folder / "held.jsonl").write_text("\n".join(lines[:3]).replace("+", "*"))
    return json.dumps(
        [
            {"label": "toy", "type": "digits", "weight": 3.0, "val_size": 4},
            {"label": "sums", "type": "jsonl", "path": "sums.jsonl", "val_size": 0},
            {"label": "held", "type": "file", "path": "held.jsonl", "weight": 0},
        ]
    )


@pytest.mark.usefixtures("scored")
def test_a_mixture_ends_the_same_if_stopped(assert_ends_the_same_if_stopped, logged, sources: str) -> None:
    functions = "reward.functions=[{type: task, name: correct}, {type: 'length_score:score', weight: 0.5}]"
    assert_ends_the_same_if_stopped("reasoning.yaml", "data.task=null", f"data.sources={sources}", functions)
    first, *trained = [row for row in logged("whole") if "prompt" not in row]
    assert {name for name in first if name.startswith("val/")} == {
        *(f"val/{part}{name}" for part in ("", "toy/", "held/") for name in ("accuracy", "len", "unscored")),
        *(f"val/reward/{name}{of}" for name in ("correct", "score") for of in ("", "/unscored")),
    }
    for row in trained:
        assert row["reward/raw_mean"] == pytest.approx(row["reward/correct"] + 0.5 * row["reward/score"])
    assert any(row["reward/score"] > 0 for row in trained)
    assert all(row["source/toy/responses"] == 3 * row["source/sums/responses"] for row in trained)
    assert all(row["source/toy/reward"] >= 0 for row in trained)
