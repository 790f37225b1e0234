"""Whole runs with environments that raise, hang, die, or give numbers that are not finite: each fault really happens,
is counted, costs one episode, and every rollout has its full size.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

ENVIRONMENTS = """
import os, time
from pathlib import Path
import gymnasium, numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv


class Breaks:
    steps = 0

    def step(self, action):
        self.steps += 1
        observation, reward, *others = super().step(action)
        return *self.fault(observation, reward), *others

    def fault(self, observation, reward):
        if self.steps < 25:  # no episode is that long: it happens in training
            return observation, reward
        try:  # in one environment, once in a run
            os.close(os.open("injected", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return observation, reward
        kind = Path("kind").read_text()
        if kind == "raise":
            raise RuntimeError("a cable broke")
        if kind == "exit":
            raise SystemExit("a cable broke")
        if kind == "hang":
            time.sleep(1000)
        if kind == "die":
            os.kill(os.getpid(), 9)
        if kind == "diverge":
            self.data.qvel[:] = 1e14
            observation, reward, *_ = super().step(np.zeros(6))  # MuJoCo resets itself, all is finite
        if kind == "nan reward":
            reward = float("nan")
        if kind == "inf observation":
            observation = observation * np.inf
        return observation, reward


class Pole(Breaks, CartPoleEnv):
    pass


class Cheetah(Breaks, HalfCheetahEnv):
    pass


gymnasium.register("Pole-v0", Pole, max_episode_steps=20)
gymnasium.register("Cheetah-v0", Cheetah, max_episode_steps=20)
"""
STEPS, NUM_ENVS, ROLLOUT = 3, 4, 16
TIMEOUT_S = 3
RUN = f"runner.max_steps={STEPS}", "env.num_workers=2", "env.evaluation.episodes=1"


@pytest.fixture
def broken(folder: Path, monkeypatch: pytest.MonkeyPatch, command):
    """broken("hang", ...): how a run with that fault ended."""
    (folder / "broken_envs.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(folder)

    def run(kind: str, *overrides: str):
        Path("kind").write_text(kind)
        name = "Cheetah" if kind == "diverge" else "Pole"
        timeout = [f"env.step_timeout_s={TIMEOUT_S}"] * (kind == "hang")
        found = command("embodied.yaml", f"env.id=broken_envs:{name}-v0", *RUN, *timeout, *overrides)
        assert Path("injected").exists(), "the fault was not injected"
        return found

    return run


@pytest.mark.parametrize(("kind", "policy"), [("raise", "mlp"), ("hang", "gru"), ("die", "mlp")])
def test_an_environment_that_fails_costs_its_episode_and_not_the_run(broken, kind: str, policy: str) -> None:
    ended = broken(kind, f"actor.model.type={policy}", "data.mini_batch_size=16")
    assert ended.code == 0, ended.err
    rows = read_metrics("out")
    assert len(rows) == STEPS + 1
    failures = [row["env/failures"] for row in rows[1:]]
    assert sum(failures) == 1
    lost = 1 if kind == "raise" else 4  # both environments of the process, and once more until the new one has begun
    assert sum(row["episode/invalid"] for row in rows[1:]) == lost
    assert [row["perf/env_steps"] for row in rows[1:]] == [NUM_ENVS * ROLLOUT] * STEPS
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_an_environment_that_calls_sys_exit_in_the_process_of_the_run_does_not_end_it(broken) -> None:
    ended = broken("exit", "env.num_workers=0")
    assert ended.code == 0, ended.err
    assert sum(row["env/failures"] for row in read_metrics("out")[1:]) == 1


@pytest.mark.parametrize("kind", ["nan reward", "inf observation", "diverge"])
def test_what_is_not_finite_costs_its_episode(broken, kind: str) -> None:
    ended = broken(kind, "env.num_workers=0")
    assert ended.code == 0, ended.err
    rows = read_metrics("out")
    assert sum(row["episode/invalid"] for row in rows[1:]) == 1
    assert {row["env/failures"] for row in rows[1:]} == {0.0}
    assert all(math.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        ("raise", 70, "a cable broke"),
        ("hang", 75, f"did not finish its step within {TIMEOUT_S} s (env.step_timeout_s)"),
        ("die", 75, "killed by SIGKILL"),
    ],
)
def test_without_restarts_the_first_failure_ends_the_run(broken, kind: str, code: int, reason: str) -> None:
    ended = broken(kind, "env.restarts=0")
    assert ended.code == code
    assert reason in ended.err
    assert "broken_envs:Pole-v0" in ended.err
