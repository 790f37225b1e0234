"""MuJoCo Warp in the place of MuJoCo: the same environments up to float32, and a clear word where it cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensor_physics import device_config, on_device

import rl_platform as rl
from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
from rl_platform.envs.embodied.mujoco.native import NativeEnvs
from rl_platform.envs.embodied.mujoco.tasks import TASKS
from rl_platform.envs.embodied.mujoco.warp import COVERED, WarpPhysics, warp_problem
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.metrics import read_metrics

INSTALLED = importlib.util.find_spec("mujoco_warp") is not None
needs_warp = pytest.mark.skipif(not INSTALLED, reason="needs `pip install 'rl-platform[warp]'`")
NUM_ENVS, STEPS = 4, 30
# Each kernel is launched a few times, so optimising it takes longer than it saves.
QUICK = 'import warp; warp.config.optimization_level, warp.config.cpu_compiler_flags = 0, "-march=native"'
OTHER_PROCESS = f"""
{QUICK}
import sys

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.vector import VectorEnv

description = EnvDescription("HalfCheetah-v5", backend="mujoco_warp")
inspect_env(description)
VectorEnv(description, 2).reset([0, 1])
print("built", flush=True)
sys.path.insert(0, "benchmarks")
import gpu

sys.exit(gpu.main(["--small", "--output", sys.argv[1], "mujoco-warp"]))
"""
ROOT = Path(__file__).parents[3]
IDS = [f"{task.__name__}-v5" for task in TASKS.values() if set(task.fields) <= COVERED]


if INSTALLED:
    exec(QUICK)


@pytest.fixture(scope="module")
def other_process(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Builds environments, then measures them. The runs are forks, so the process imports MuJoCo Warp once for all."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path_factory.mktemp("acceptance"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def both(env_id: str) -> tuple[NativeEnvs, NativeEnvs]:
    env = make_env(EnvDescription(env_id, max_episode_steps=20))
    pair = [NativeEnvs.of(env, NUM_ENVS, 1, backend) for backend in ("mujoco", "mujoco_warp")]
    first = [envs.reset(np.arange(NUM_ENVS), [0, 1, 2, 3]) for envs in pair]
    np.testing.assert_allclose(first[0], first[1], rtol=0, atol=1e-6)
    return pair[0], pair[1]


@needs_warp
@pytest.mark.parametrize("env_id", IDS)
def test_steps_are_those_of_mujoco_up_to_float32(env_id: str) -> None:
    """From the same states: over many steps, contacts let the smallest differences grow."""
    exact, warp = both(env_id)
    space, rng = make_env(EnvDescription(env_id)).action_space, np.random.default_rng(0)
    everyone, lengths = np.arange(NUM_ENVS), np.zeros(NUM_ENVS, np.int64)
    for _ in range(STEPS):
        actions = rng.uniform(space.low, space.high, (NUM_ENVS, *space.shape)).astype(np.float32)
        qpos, qvel = exact._physics.now.qpos.copy(), exact._physics.now.qvel.copy()
        for envs in (exact, warp):
            envs._physics.reset(everyone, qpos, qvel)
            envs.positions[:] = envs.task.position(envs._physics.now)
        actual, expected = warp.step(actions, lengths), exact.step(actions, lengths)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-2, atol=2e-2)
        np.testing.assert_allclose(actual[1], expected[1], rtol=1e-2, atol=1e-3)
        np.testing.assert_array_equal(actual[2], expected[2])
        assert not warp.diverged.any()


@needs_warp
def test_a_saved_state_goes_on_and_idle_environments_stand_still() -> None:
    warp, again = (both("HalfCheetah-v5")[1] for _ in range(2))
    rng, lengths = np.random.default_rng(0), np.zeros(NUM_ENVS, np.int64)
    actions = rng.uniform(-1, 1, (8, NUM_ENVS, 6)).astype(np.float32)
    idle = np.array([False, True, False, False])
    kept = warp.save(1)
    for action in actions[:4]:
        warp.step(action, lengths, idle)
        lengths += ~idle
    assert warp.save(1) == kept
    for index in range(NUM_ENVS):
        again.restore(index, warp.save(index))
    for action in actions[4:]:
        for mine, other in zip(warp.step(action, lengths), again.step(action, lengths), strict=True):
            np.testing.assert_array_equal(mine, other)
        lengths += 1


@needs_warp
def test_a_graph_steps_as_the_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets and restored states reach the next steps of a graph."""
    plain, graph = (both("HalfCheetah-v5")[1] for _ in range(2))
    monkeypatch.setattr(plain._physics, "_run", lambda name, launch: launch())
    actions = np.random.default_rng(0).uniform(-1, 1, (9, NUM_ENVS, 6)).astype(np.float32)
    idle, lengths = np.array([False, True, False, False]), np.zeros(NUM_ENVS, np.int64)
    for number, action in enumerate(actions):
        if number == 4:
            for envs in (plain, graph):
                envs.reset(np.array([2]), [7])
                envs.restore(3, envs.save(0))
        expected, actual = (envs.step(action, lengths, idle if number == 6 else None) for envs in (plain, graph))
        for mine, other in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(mine[~idle], other[~idle])
    assert graph._physics._graphs.keys() == {"step", "reset", "forward"}
    assert "step" not in plain._physics._graphs


@needs_warp
@pytest.mark.parametrize("env_id", IDS)
def test_a_rollout_that_stays_on_the_device_is_that_of_main_memory(env_id: str) -> None:
    """torch and NumPy may compute a sine differently in the last bit."""
    exact = env_id not in ("InvertedDoublePendulum-v5", "Reacher-v5")
    batches, metrics = [], []
    for stays in (True, False):
        with on_device(device_config(id=env_id, on_device=stays), torch.device("cpu"), WarpPhysics) as (environment, _):
            assert (environment.device_obstacle(environment.context.shared["rollout[0]"]) is None) == stays
            rollouts = [environment.collect(step, None) for step in range(3)]
            batches.append([batch.tensors() for batch, _ in rollouts])
            metrics.append([numbers for _, numbers in rollouts])
            assert sum(numbers["episode/count"] for numbers in metrics[-1]) >= 3
    for found, expected in zip(*batches, strict=True):
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other) if exact else torch.allclose(mine, other, rtol=1e-3, atol=1e-4)
    assert not exact or metrics[0] == metrics[1]


@needs_warp
def test_a_run_is_the_same_on_both_paths_and_resumes_exactly(tmp_path: Path) -> None:
    overrides = {"env.id": "Hopper-v5", "env.backend": "mujoco_warp", "env.num_envs": 4, "env.rollout_steps": 16}
    overrides |= {"env.max_episode_steps": 12, "env.evaluation": {"episodes": 2, "video": False}}
    overrides |= {"data.mini_batch_size": 32, "algorithm.ppo_epochs": 2, "actor.optim.lr_schedule": "constant"}
    overrides |= {"runner.val_check_interval": 2, "runner.save_interval": 2, "runner.logger_backends": []}

    def train(name: str, steps: int, **more: object) -> list[dict[str, float]]:
        chosen = overrides | {"runner.output_dir": str(tmp_path / name), "runner.max_steps": steps} | more
        rl.train(ROOT / "configs/embodied/ppo.yaml", chosen, show=False)
        timed = ("time/", "perf/", "runtime/")
        rows = read_metrics(tmp_path / name)
        return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]

    stays = train("stays", 4)
    assert train("main memory", 4, **{"env.on_device": False}) == stays
    train("resumed", 2)
    assert train("resumed", 4) == stays
    weights = [
        (tmp_path / name / "model" / "policy.safetensors").read_bytes() for name in ("stays", "main memory", "resumed")
    ]
    assert weights[0] == weights[1] == weights[2]
    assert any("val/return" in row for row in stays)


@needs_warp
def test_the_backend_of_a_description_is_what_steps() -> None:
    envs = VectorEnv(EnvDescription("InvertedPendulum-v5", backend="mujoco_warp"), 2)
    assert type(envs._blocks[0]._native._physics).__name__ == "WarpPhysics"
    envs.reset([0, 1])
    assert np.isfinite(envs.step(np.zeros((2, 1), np.float32)).observations).all()
    envs.close()


@pytest.mark.parametrize(
    ("name", "message"), [("CartPole-v1", "CartPole-v1 is none of the tasks"), ("Ant-v5", "cfrc_ext")]
)
def test_other_environments_and_those_that_observe_contact_forces_are_refused(name: str, message: str) -> None:
    problem = warp_problem(make_env(EnvDescription(name)))
    assert problem is not None
    assert message in problem.message


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_the_package_it_says_how_to_get_it() -> None:
    problem = warp_problem(make_env(EnvDescription("Hopper-v5")))
    assert problem is not None
    assert "not installed" in problem.message
    assert "rl-platform[warp]" in problem.hint


@needs_warp
def test_a_covered_task_has_no_problem() -> None:
    assert warp_problem(make_env(EnvDescription("Hopper-v5"))) is None


@needs_warp
def test_the_acceptance_of_a_gpu_can_measure_it(other_process: subprocess.CompletedProcess[str]) -> None:
    assert other_process.returncode == 0, other_process.stdout + other_process.stderr


@needs_warp
def test_it_prints_nothing(other_process: subprocess.CompletedProcess[str]) -> None:
    """Warp prints a line when it loads a kernel, so another process has to load them."""
    assert other_process.stdout.startswith("built\n"), other_process.stdout + other_process.stderr
