"""The core trains both tasks in a copy of the package without the folders of the extras."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
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
PROGRAM = """
import sys
import rl_platform
assert list(rl_platform.__path__) == [sys.argv.pop(1)], rl_platform.__path__
from rl_platform.launch.cli import main
main()
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `rl_platform` as a wheel installs it, but without the extras."""
    folder = tmp_path_factory.mktemp("core")
    lay_out(folder)
    for extra in EXTRAS:
        shutil.rmtree(folder / "rl_platform" / extra)
    (folder / "sitecustomize.py").write_text(FORGET)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("embodied/cartpole.yaml", ("env.evaluation.episodes=2",)), ("reasoning/ppo_tiny.yaml", ("data.val_size=8",))],
)
def test_the_core_trains_without_any_extra(core: Path, tmp_path: Path, name: str, overrides: tuple[str, ...]) -> None:
    run = ("runner.max_steps=2", f"runner.output_dir={tmp_path}", "runner.logger_backends=[]", "cluster.runtime=local")
    command = [sys.executable, "-c", PROGRAM, core / "rl_platform", ROOT / "configs" / name, *run, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(core)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_a_config_that_needs_a_missing_extra_is_refused(core: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(core)}
    no_logger = "runner.logger_backends=[]"
    two_env_ranks = "cluster.component_placement={'actor_critic,rollout': all, env: '0:0-1'}"
    groups = ("algorithm.group_size=2", "algorithm.dynamic_sampling={}", no_logger)
    for name, overrides, extra in (
        ("embodied/cartpole.yaml", ("actor.model.type=gru", no_logger), "rl_platform.models.policies"),
        ("embodied/cartpole.yaml", (), "rl_platform.trackers"),
        ("reasoning/ppo_tiny.yaml", groups, "rl_platform.runners.collection"),
        ("reasoning/ppo_tiny.yaml", ("runner.max_staleness=1", no_logger), "rl_platform.runners.collection"),
        ("embodied/cartpole.yaml", (two_env_ranks, no_logger), "rl_platform.components.env_ranks"),
        ("embodied/cartpole.yaml", ("algorithm.policy_loss=sapo", no_logger), "rl_platform.algorithms.variants"),
        ("reasoning/ppo_tiny.yaml", ("rollout.stop=[xy]", no_logger), "rl_platform.engines.rollout.stopping"),
        ("reasoning/ppo_tiny.yaml", ("actor.optim.lr=${critic.optim.lr}", no_logger), "rl_platform.config.references"),
        ("reasoning/ppo_tiny.yaml", ("critic.model.dtype=auto", no_logger), "rl_platform.placement.estimates"),
        (
            "reasoning/ppo_tiny.yaml",
            ("reward.functions=[{type: task}, {type: exact_match, weight: 0.5}]", no_logger),
            "rl_platform.components.weighted_rewards",
        ),
        (
            "reasoning/ppo_tiny.yaml",
            ("rollout.multi_turn={max_observation_tokens: 2}", "data.max_response_length=8", no_logger),
            "rl_platform.components.agents",
        ),
    ):
        command = [sys.executable, "-c", PROGRAM, core / "rl_platform", ROOT / "configs" / name]
        command += [f"runner.output_dir={tmp_path}", "cluster.runtime=local", *overrides]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert f"{extra} is not installed" in ended.stderr
