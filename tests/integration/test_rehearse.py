"""Whole rehearsals: two steps, a kill and a resume in small, and the mistakes that they find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"
NEEDS_MORE = ("fetch_reach", "metaworld_reach")  # simulators that are not installed with the tests


@pytest.mark.slow
def test_a_rehearsal_reports_and_leaves_only_its_report(command, folder):
    (folder / "temporary").mkdir()
    ended = command("--rehearse", "reasoning.yaml", "--rehearse-in", "temporary")
    assert ended.code == 0, ended.err
    assert "passed in" in ended.out
    written = (folder / "reasoning.yaml").read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(written) if "max_steps" in text)
    assert f"smaller: reasoning.yaml:{line}: runner.max_steps: 4 -> 2" in ended.out
    assert (folder / "out-rehearsal.txt").read_text() in ended.out
    report = json.loads((folder / "out-rehearsal.json").read_text())
    assert [phase["name"] for phase in report["phases"]][-1] == "resume, second step, export"
    assert not (folder / "out").exists()
    assert not list((folder / "temporary").iterdir())


@pytest.mark.slow
def test_a_reward_that_returns_a_string_is_found(command, folder):
    (folder / "text_reward.py").write_text("def score(response, answer, metadata):\n    return 'good'\n")
    ended = command("--rehearse", "reasoning.yaml", "reward.type=text_reward:score")
    assert ended.code == 70
    assert "text_reward:score" in ended.err
    assert "'good'" in ended.err


def test_a_template_without_the_question_is_refused(command):
    ended = command("--rehearse", "reasoning.yaml", "data.prompt_template=Answer:")
    assert ended.code == 2
    assert "data.prompt_template" in ended.err


def test_a_folder_that_is_not_there_is_refused(command):
    ended = command("--rehearse", "reasoning.yaml", "--rehearse-in", "nowhere")
    assert ended.code == 2
    assert "--rehearse-in" in ended.err


@pytest.mark.release
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_config_can_be_rehearsed(command, path):
    if path.stem in NEEDS_MORE:
        pytest.skip("its simulator is an extra")
    ended = command("--rehearse", path)
    assert ended.code == 0, ended.err
