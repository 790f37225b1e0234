"""Whole runs that generate with real SGLang, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_engine import ENGINE_ENV, needs_sglang

from rl_platform.metrics import read_metrics

pytestmark = [needs_sglang, pytest.mark.timeout(900)]
WITH_SGLANG = ["rollout.backend=sglang", f"rollout.engine_env={json.dumps(ENGINE_ENV)}", "runner.max_steps=3"]


def test_a_run_with_sglang_trains_on_what_it_generated(command, folder: Path) -> None:
    ended = command("reasoning.yaml", *WITH_SGLANG)
    assert ended.code == 0, ended.err
    rows = read_metrics("out")[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:  # the trainer's log-probs of these tokens, under the weights of this very step
        assert row["mismatch/abs_logp"] < 1e-4
        assert row["staleness/max"] == 0
    assert rows[-1]["actor/grad_norm"] > 0
    assert (folder / "out" / "logs" / "rollout[0]-sglang.log").exists()
