"""A rollout process that dies while responses are cut and continued: no prompt is lost, none is trained on twice."""

from __future__ import annotations

import json
import os
import signal
import string
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rl_platform.components.rollout import LanguageRollout
from rl_platform.metrics import read_metrics
from rl_platform.runners import reasoning

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 4
RUN = [
    "reasoning.yaml",
    f"runner.max_steps={STEPS}",
    "data.max_response_length=6",
    f"rollout.stop={json.dumps(list(string.ascii_letters))}",  # so that lengths differ
    "rollout.max_running_requests=3",
    "rollout.partial_rollout={}",
    "algorithm.rollout_is={}",
    "cluster.runtime=ray",
    "cluster.devices_per_node=4",
    "cluster.component_placement={'actor,critic': 0, rollout: 1-2, reward: 3}",
]


class DiesHalfway(LanguageRollout):
    """Rank 1 is killed once, in the third step, with some responses delivered and others in work."""

    def generate_until(self, groups: Any, needed: int, sampling: Any, step: int, *others: Any) -> None:
        progress = self.context.progress
        original = progress.update

        def update(done: int, total: int, unit: str) -> None:
            original(done, total, unit)
            if done == 2 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        if step == 2 and self.context.rank == 1:
            progress.update = update  # type: ignore[method-assign]
        super().generate_until(groups, needed, sampling, step, *others)


@pytest.mark.usefixtures("folder")
def test_each_prompt_is_trained_on_once_although_a_rank_is_killed(command, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    original = reasoning.trajectory_metrics  # asked for once, of the whole batch

    def noted(trajectories: Any) -> dict[str, float]:
        trained.extend(trajectories)
        return original(trajectories)

    monkeypatch.setattr(reasoning, "trajectory_metrics", noted)
    monkeypatch.setattr(reasoning, "LanguageRollout", DiesHalfway)
    ended = command(*RUN)
    assert ended.code == 0, ended.err
    assert Path("killed").exists()
    rows = read_metrics("out")[1:]
    assert [row["runtime/restarts"] for row in rows] == [0, 0, 1, 1]
    assert [row["perf/samples"] for row in rows] == [8] * STEPS
    assert rows[-1]["partial_rollout/open_prompts"] == 0
    assert max(row["partial_rollout/continued_frac"] for row in rows) > 0
    counts = Counter(one.prompt.index for one in trained)
    assert set(counts.values()) == {1}
    assert len(counts) == STEPS * 8
    assert all(one.complete and one.valid for one in trained)
