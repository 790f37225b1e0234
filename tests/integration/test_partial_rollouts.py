"""Whole runs in which responses are cut at the end of a step and go on in the next."""

from __future__ import annotations

import pytest

from rl_platform.metrics import read_metrics

STEPS = 6
PARTIAL = (
    "reasoning.yaml",
    f"runner.max_steps={STEPS}",
    "runner.save_interval=1",
    "runner.keep_checkpoints=10",
    "data.max_response_length=8",
    "rollout.max_running_requests=5",  # so that some are cut in their middle
    "rollout.partial_rollout={}",
    "algorithm.rollout_is={}",
)


def test_a_run_trains_on_responses_of_several_versions_and_its_checkpoints_need_the_key(command, final_state) -> None:
    ended = command(*PARTIAL)
    assert ended.code == 0, ended.err
    assert "partial rollouts: 12 prompts in work, 8 trained on per step" in ended.out
    rows = read_metrics("out")[1:]
    assert [row["perf/samples"] for row in rows] == [8] * STEPS
    assert rows[0]["staleness/stale_token_frac"] == 0 < max(row["staleness/stale_token_frac"] for row in rows)
    assert max(row["partial_rollout/continued_frac"] for row in rows) > 0
    assert max(row["partial_rollout/cut"] for row in rows) > 0
    assert [row["partial_rollout/open_prompts"] for row in rows] == [4] * (STEPS - 1) + [0]
    for row in rows:  # only tokens of older weights have other log-probs now
        assert (row["mismatch/abs_logp"] > 1e-5) == (row["staleness/stale_token_frac"] > 0)
        assert (row["is/weight_max"] - row["is/weight_min"] > 1e-5) == (row["staleness/stale_token_frac"] > 0)
    assert final_state("out", STEPS)["run"]["task"]["partial_rollouts"]["open"] == []
    halfway = final_state("out", 3)["run"]["task"]["partial_rollouts"]["open"]
    assert len(halfway) == 4
    assert any(one["token_ids"] for group in halfway for one in group)
    back = "runner.resume=out/checkpoints/step-00000003"
    ended = command(*PARTIAL, back, "rollout.partial_rollout=null", "runner.output_dir=other")
    assert ended.code == 65
    assert "4 prompts whose responses are not trained on yet: resume with rollout.partial_rollout" in ended.err


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.release), 1])
def test_killed_and_resumed_it_ends_in_the_same_state(command, killed, final_state, logged, differences, ahead) -> None:
    arguments = (*PARTIAL, f"runner.max_staleness={ahead}")
    assert command(*arguments, "runner.output_dir=whole").code == 0
    killed(*arguments, folder="killed", at="step-00000002")
    ended = command(*arguments, "runner.output_dir=killed")
    assert ended.code == 0, ended.err
    assert "resumed from step" in ended.out
    assert differences(*(final_state(folder, STEPS) for folder in ("whole", "killed"))) == []
    assert differences(*(logged(folder) for folder in ("whole", "killed"))) == []
