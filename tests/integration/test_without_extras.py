"""The core trains both tasks in a copy of the package without the folders of the extras."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from as_installed import lay_out

from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[2]
EXTRAS = [
    name.removeprefix("rl_platform.").replace(".", "/")
    for name in runpy.run_path(str(ROOT / "tests" / "unit" / "test_layout.py"))["EXTRAS"]
]
# `sitecustomize.py` of the copy: every process that starts there forgets where the checkout is installed.
FORGET = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
sys.path_hooks = [hook for hook in sys.path_hooks if "Editable" not in repr(hook)]
sys.path_importer_cache.clear()
"""
# Runs `platform-launch` in a fork for each line of words, so that the imports are paid once.
PROGRAM = """
import json, os, sys

import rl_platform
assert list(rl_platform.__path__) == [sys.argv[1]], rl_platform.__path__
from rl_platform.launch.cli import main
from rl_platform.launch import session

results = []
for number, words in enumerate(json.loads(sys.argv[2])):
    if not (pid := os.fork()):
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["platform-launch", *words]
        main()  # exits
    results.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(results))
"""
RUNS = {
    "embodied/cartpole.yaml": ("env.evaluation.episodes=2",),
    "reasoning/ppo_tiny.yaml": ("data.val_size=8",),
}
TRACKERS = "rl_platform.trackers"
REFUSED = (
    ("embodied/cartpole.yaml", ("actor.model.type=gru",), "rl_platform.models.policies"),
    ("embodied/cartpole.yaml", (), TRACKERS),
    (
        "reasoning/ppo_tiny.yaml",
        ("algorithm.group_size=2", "algorithm.dynamic_sampling={}"),
        "rl_platform.runners.collection",
    ),
    ("reasoning/ppo_tiny.yaml", ("runner.max_staleness=1",), "rl_platform.runners.collection"),
    (
        "embodied/cartpole.yaml",
        ("cluster.component_placement={'actor_critic,rollout': all, env: '0:0-1'}",),
        "rl_platform.components.env_ranks",
    ),
    ("embodied/cartpole.yaml", ("algorithm.policy_loss=sapo",), "rl_platform.algorithms.variants"),
    ("reasoning/ppo_tiny.yaml", ("rollout.stop=[xy]",), "rl_platform.engines.rollout.stopping"),
    ("reasoning/ppo_tiny.yaml", ("actor.optim.lr=${critic.optim.lr}",), "rl_platform.config.references"),
    ("reasoning/ppo_tiny.yaml", ("critic.model.dtype=auto",), "rl_platform.placement.estimates"),
    (
        "reasoning/ppo_tiny.yaml",
        ("reward.functions=[{type: task}, {type: exact_match, weight: 0.5}]",),
        "rl_platform.components.weighted_rewards",
    ),
    (
        "reasoning/ppo_tiny.yaml",
        ("rollout.multi_turn={max_observation_tokens: 2}", "data.max_response_length=8"),
        "rl_platform.components.agents",
    ),
)


@dataclass(frozen=True)
class Ended:
    code: int
    folder: Path
    err: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """How RUNS, then REFUSED ended with `rl_platform` as a wheel installs it, but without the extras."""
    core, folder = (tmp_path_factory.mktemp(name) for name in ("core", "runs"))
    lay_out(core)
    for extra in EXTRAS:
        shutil.rmtree(core / "rl_platform" / extra)
    (core / "sitecustomize.py").write_text(FORGET)
    cases = [(name, ("runner.max_steps=2", *overrides), "") for name, overrides in RUNS.items()] + [*REFUSED]
    words = [
        [
            str(ROOT / "configs" / name),
            f"runner.output_dir=run-{number}",
            "cluster.runtime=local",
            *([] if extra == TRACKERS else ["runner.logger_backends=[]"]),
            *overrides,
        ]
        for number, (name, overrides, extra) in enumerate(cases)
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(core)}
    command = [sys.executable, "-c", PROGRAM, core / "rl_platform", json.dumps(words)]
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert made.returncode == 0, made.stdout + made.stderr
    codes = json.loads(made.stdout)
    return [
        Ended(code, folder / f"run-{number}", (folder / f"{number}.err").read_text())
        for number, code in enumerate(codes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)), ids=list(RUNS))
def test_the_core_trains_without_any_extra(ended: list[Ended], number: int) -> None:
    assert ended[number].code == 0, ended[number].err
    assert [metrics["step"] for metrics in read_metrics(ended[number].folder / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_a_config_that_needs_a_missing_extra_is_refused(ended: list[Ended]) -> None:
    for run, (_, _, extra) in zip(ended[len(RUNS) :], REFUSED, strict=True):
        assert run.code == 2, run.err
        assert f"{extra} is not installed" in run.err
