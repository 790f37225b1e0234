"""Keys of the policy loss and the estimators in real runs: what they save, and that they may stand together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

ONE_STEP = ["runner.max_steps=2", "algorithm.ppo_epochs=1", "data.mini_batch_size=8"]


def last_line(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_old_log_probs_of_all_sources_train_alike_and_two_save_the_pass(command, folder: Path, final_state) -> None:
    """With one optimizer step per rollout all ratios are 1 but for the rounding of the engines."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for source in ("recompute", "rollout", "current"):
        ended = command("reasoning.yaml", *ONE_STEP, f"algorithm.old_log_probs={source}", f"runner.output_dir={source}")
        assert ended.code == 0, ended.err
        metrics = last_line(folder / source)
        assert ("time/log-probs" in metrics) == (source == "recompute")
        assert any(name.startswith("mismatch/") for name in metrics) == (source == "recompute")
        assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        found[source] = final_state(source, 2)["actor"]["model"]
    for source in ("rollout", "current"):
        for name, tensor in found["recompute"].items():
            torch.testing.assert_close(found[source][name], tensor, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(("options", "generated"), [("", 8), ("prompts_per_round: 20, ", 20)])
def test_a_round_may_generate_more_than_a_step_needs(command, folder: Path, options: str, generated: int) -> None:
    sampling = f"{{{options}max_rounds: 1, on_exhausted: fill_with_rejected}}"
    algorithm = f"algorithm={{group_size: 2, dynamic_sampling: {sampling}}}"
    ended = command("reasoning.yaml", "runner.max_steps=1", algorithm)
    assert ended.code == 0, ended.err
    metrics = last_line(folder / "out")
    assert metrics["dynamic_sampling/generated"] == generated
    assert metrics["perf/samples"] == 16
    assert metrics["staleness/max"] == 0


def test_responses_that_were_cut_go_on_with_the_critics_value(command, folder: Path) -> None:
    """A random model never stops; the critic starts at 0, so the difference shows from the second step on."""
    returns = {}
    for switch in ("false", "true"):
        overrides = ["runner.max_steps=2", "algorithm={gae_lambda: 1.0, reward_scaling: {}}", "critic.optim.lr=0.1"]
        overrides += [f"algorithm.bootstrap_truncated={switch}", f"runner.output_dir=out-{switch}"]
        ended = command("reasoning.yaml", *overrides)
        assert ended.code == 0, ended.err
        metrics = last_line(folder / f"out-{switch}")
        assert metrics["len/response_clip_frac"] > 0.9
        returns[switch] = metrics["critic/returns_mean"]
        assert (returns[switch] == pytest.approx(metrics["reward/mean"], abs=1e-6)) == (switch == "false")
    assert abs(returns["true"] - returns["false"]) > 1e-3


def test_controls_of_groups_work_together(command, folder: Path) -> None:
    algorithm = (
        "{adv_type: grpo, group_size: 4, grpo_leave_one_out: true, advantage_clip: [-3, 3], ppo_epochs: 2, "
        "loss_agg_func: seq-mean-token-sum, loss_agg_denominator: nominal, positive_nll_coef: 0.1, "
        "positive_nll_norm: all_tokens, shuffle_mini_batches: false, rollout_is: {mode: icepop, denominator: kept}}"
    )
    overrides = ["runner.max_steps=2", f"algorithm={algorithm}", "critic={use_critic_model: false}"]
    ended = command("reasoning.yaml", *overrides, "cluster.component_placement={'actor,rollout,reward': all}")
    assert ended.code == 0, ended.err
    assert "masked ones included" in ended.out
    metrics = last_line(folder / "out")
    assert -3 <= metrics["adv/min"] <= metrics["adv/max"] <= 3


def test_a_verifier_may_reward_single_steps(command, folder: Path) -> None:
    (folder / "steps.py").write_text(
        "def bytes_count(response, answer, metadata):\n    return 0.0, [(1, 0.25)] if response else []\n"
    )
    ended = command("reasoning.yaml", "runner.max_steps=1", "reward.type=steps:bytes_count")
    assert ended.code == 0, ended.err
    metrics = last_line(folder / "out")
    assert metrics["reward/raw_mean"] == 0.0
    assert metrics["reward/process_mean"] == pytest.approx(metrics["reward/mean"])
    assert metrics["reward/process_mean"] > 0.1


WITHOUT_CRITIC = [
    "{adv_type: grpo, group_size: 4}",
    "{adv_type: reinforce_plus_plus}",
    "{adv_type: remax}",
    "{adv_type: optimal_token_baseline, group_size: 4, rollout_is: {}}",
    "{adv_type: 'mine:zero'}",
]


@pytest.mark.parametrize("algorithm", WITHOUT_CRITIC)
def test_an_estimator_without_a_critic_builds_none(
    command, folder: Path, final_state, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    (folder / "mine.py").write_text("def zero(batch, algorithm):\n    return batch.rewards * 0, None\n")
    monkeypatch.syspath_prepend(folder)
    overrides = ["runner.max_steps=2", f"algorithm={algorithm}", "critic={use_critic_model: false}"]
    ended = command("reasoning.yaml", *overrides, "cluster.component_placement={'actor,rollout,reward': all}")
    assert ended.code == 0, ended.err
    assert "none: there is no critic" in ended.out
    for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
        names = json.loads(line).keys()
        assert not [name for name in names if "critic" in name or name == "time/values"]
        assert ("baseline/mean" in names) == ("remax" in algorithm and json.loads(line)["step"] > 0)
    parts = final_state("out", 2)
    assert "critic" not in parts
    tensors = [tensor for tensor in parts["actor"]["model"].values() if isinstance(tensor, torch.Tensor)]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
