"""Stepping, ends of episodes, faults and processes of the vector environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest
from waiting import alive, until

from rl_platform.envs.embodied.build_problems.find_failure import similar_ids
from rl_platform.envs.embodied.descriptions import EnvDescription, find_spec
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.mujoco.deprecations import deprecations_once
from rl_platform.envs.embodied.processes import workers as worker_processes
from rl_platform.envs.embodied.processes.worker import cpu_shares
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.envs.embodied.vector import EpisodeStats, StepResult, VectorEnv
from rl_platform.errors import ConfigError, Deadline, Diverged, WorkerDied, WorkerError

TOY = "toy_envs:Toy-v0"


@pytest.fixture(params=[0, 2], ids=["this process", "workers"])
def num_workers(request: pytest.FixtureRequest) -> int:
    return request.param


def _actions(envs: VectorEnv, value: float = 0.0) -> np.ndarray:
    return np.full((envs.num_envs, envs.action_space.size), value)


def _steps(envs: VectorEnv, count: int) -> None:
    for _ in range(count):
        envs.step(_actions(envs))


@pytest.mark.parametrize("which", [1, 2])
def test_an_environment_that_cannot_be_closed_is_told_and_costs_nothing(make, which: int, caplog) -> None:
    description = EnvDescription("toy_envs:Unclosable-v0", {"which": which})
    assert inspect_env(description).spaces.observation_shape == (1, 2)
    for _ in range(2):  # as an evaluation, which closes its environments
        envs = make(description, 2)
        envs.reset([0, 1])
        _steps(envs, 7)
        envs.close()
    (record,) = caplog.records
    told = rf"toy_envs:Unclosable-v0: close\(\) raised RuntimeError at .*toy_envs.py:\d+: the viewer of {which} is gone"
    assert re.fullmatch(told, record.getMessage())


@pytest.mark.parametrize("used", [False, True], ids=["built for its spaces", "used"])
def test_of_workers_and_evaluations_one_tells_that_it_cannot_be_closed(
    make, used: bool, tmp_path: Path, caplog, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_platform.envs.embodied.descriptions._told", set())
    kwargs = {"which": 3 + used, "used": str(tmp_path / "closing") if used else ""}
    first = make(EnvDescription("toy_envs:Unclosable-v0", kwargs), 2, 2)
    for other in (first, make(EnvDescription("toy_envs:Unclosable-v0", kwargs), 2, 2)):
        other.warned_as(first)
        other.reset([0, 1])
        _steps(other, 1)
        other.close()
    told = [record.getMessage() for record in caplog.records] + capfd.readouterr().err.splitlines()
    assert sum("close() raised RuntimeError" in text for text in told) == 1, told


def test_truncation_gives_the_true_last_and_the_next_first_observation(make, num_workers: int) -> None:
    envs = make(TOY, 3, num_workers)
    assert envs.reset([0, 1, 2]).tolist() == [[1, 0]] * 3
    for step in range(1, 5):
        result = envs.step(_actions(envs, 0.5))
        assert result.observations.tolist() == [[1, step]] * 3
        assert not result.ended.any()
        assert result.final_observations.shape == (0, 2)
    result = envs.step(_actions(envs, 0.5))
    assert result.truncated.all()
    assert not result.terminated.any()
    assert result.final_observations.tolist() == [[1, 5]] * 3
    assert result.observations.tolist() == [[2, 0]] * 3
    assert result.episodes == [EpisodeStats(i, 2.5, 5) for i in range(3)]
    assert result.observations.dtype == np.float32


def test_termination_is_not_truncation(make, num_workers: int) -> None:
    envs = make(TOY, 2, num_workers, {"terminate_at": 2})
    envs.reset([0, 1])
    envs.step(_actions(envs))
    result = envs.step(_actions(envs))
    assert result.terminated.all()
    assert not result.truncated.any()
    assert [episode.length for episode in result.episodes] == [2, 2]


def test_actions_are_clipped_to_the_bounds_and_keep_their_order(make, num_workers: int) -> None:
    envs = make(TOY, 3, num_workers)
    assert envs.action_space == ActionSpace("continuous", 2)
    assert envs.observation_shape == (2,)
    envs.reset([0, 1, 2])
    actions = np.array([[7.0, 0.0], [-0.25, 0.0], [-3.0, 0.0]])
    result = envs.step(actions)
    assert result.rewards.tolist() == [1.0, -0.25, -1.0]
    assert actions[0, 0] == 7.0


def test_actions_at_bounds_that_float32_lacks_are_in_the_space(make, num_workers: int) -> None:
    envs = make("toy_envs:Double-v0", 2, num_workers)
    envs.reset([0, 1])
    result = envs.step(np.array([[9.0, -9.0], [-9.0, 9.0]]))  # the environment refuses others
    assert result.rewards == pytest.approx([0.1, -0.3])
    assert envs.spaces.action_low[1] == np.float32(-0.7)  # nearest to it and above it


def test_actions_of_float16_have_that_type(make, num_workers: int) -> None:
    envs = make("toy_envs:Half-v0", 2, num_workers)
    envs.reset([0, 1])
    result = envs.step(np.array([[9.0, 0.1], [-9.0, 0.1]]))  # the environment refuses other types
    assert result.rewards.tolist() == [np.float16(0.7), np.float16(-0.3)]
    assert np.isfinite(result.rewards).all()


def test_discrete_actions_start_where_the_space_starts(make, num_workers: int) -> None:
    envs = make("toy_envs:Started-v0", 2, num_workers)
    assert envs.action_space == ActionSpace("discrete", 3)
    envs.reset([0, 1])
    assert envs.step(np.array([0, 2])).rewards.tolist() == [5.0, 7.0]


def test_results_do_not_change_with_later_steps(make, num_workers: int) -> None:
    envs = make(TOY, 2, num_workers)
    envs.reset([0, 1])
    first = envs.step(_actions(envs, 1.0))
    copies = (first.observations.copy(), first.rewards.copy())
    envs.step(_actions(envs, -1.0))
    assert np.array_equal(first.observations, copies[0])
    assert np.array_equal(first.rewards, copies[1])


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "CartPole-v1"])
def test_workers_and_gymnasium_itself_give_the_same_numbers(make, env_id: str) -> None:
    import gymnasium

    ours = [make(env_id, 3, workers) for workers in (0, 2, 3)]
    starts = [envs.reset([10, 11, 12]) for envs in ours]
    env = gymnasium.make(env_id, disable_env_checker=True)
    observation, _ = env.reset(seed=11)
    rng = np.random.default_rng(0)
    for _ in range(60):
        assert all(np.array_equal(start, starts[0]) for start in starts)
        assert np.array_equal(starts[0][1], observation.astype(np.float32))
        continuous = ours[0].action_space.kind == "continuous"
        actions = rng.uniform(-1, 1, (3, 6)).astype(np.float32) if continuous else rng.integers(0, 2, 3)
        results = [envs.step(actions) for envs in ours]
        observation, reward, terminated, truncated, _ = env.step(actions[1])
        assert all(result.rewards[1] == reward for result in results)
        if terminated or truncated:
            ended = int(np.flatnonzero(results[0].ended).tolist().index(1))
            assert np.array_equal(results[0].final_observations[ended], observation.astype(np.float32))
            observation, _ = env.reset()
        starts = [result.observations for result in results]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nan reward", "its reward is nan"), ("inf observation", "its observation has inf at [0, 1] of shape (1, 2)")],
)
def test_numbers_that_are_not_finite_end_the_episode_and_stay_inside(
    make, num_workers: int, fault: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    envs = make(TOY, 3, num_workers, {"fault": fault, "which": 1, "at": 3})
    envs.reset([0, 1, 2])
    results: list[StepResult] = [envs.step(_actions(envs, 0.5)) for _ in range(8)]
    for result in results:
        for array in (result.observations, result.rewards, result.final_observations):
            assert np.isfinite(array).all()
    assert [result.invalid.tolist() for result in results[2:4]] == [[False, True, False], [False] * 3]
    assert results[2].truncated.tolist() == [False, True, False]
    assert not results[2].terminated.any()
    assert results[2].rewards.tolist() == [0.5, 0.0, 0.5]
    assert results[2].final_observations.tolist() == [[1, 2]]
    assert results[2].observations.tolist() == [[1, 3], [2, 0], [1, 3]]
    assert results[2].episodes == []
    assert [episode.env_index for episode in results[4].episodes] == [0, 2]
    assert results[5].invalid.tolist() == [False, True, False], "the fault comes again in the next episode"
    if num_workers == 0:  # workers print it
        (warning,) = caplog.messages
        assert warning.startswith(f"environment 1 (toy_envs:Toy-v0): {reason} in step 3 of an episode")


def test_an_env_that_raises_is_named_with_its_traceback(make, num_workers: int) -> None:
    envs = make(TOY, 4, num_workers, {"fault": "raise", "which": 3})
    envs.reset(range(4))
    pids = envs.worker_pids
    with pytest.raises(WorkerError, match=r"environment 3 \(toy_envs:Toy-v0\) failed in step") as caught:
        _steps(envs, 3)
    assert "the arm fell off" in str(caught.value)
    assert "toy_envs.py" in str(caught.value)
    assert alive(pids) == []


def test_an_env_that_hangs_meets_the_deadline(make) -> None:
    envs = make(TOY, 4, 2, {"fault": "hang", "which": 3}, step_timeout_s=2.0)
    envs.reset(range(4))
    pids = envs.worker_pids
    with pytest.raises(Deadline, match=r"environment 3 \(toy_envs:Toy-v0\) in environment worker 1 .*did not finish"):
        _steps(envs, 3)
    assert alive(pids) == []


def test_a_worker_that_dies_in_a_step_is_named_with_its_signal(make) -> None:
    envs = make(TOY, 4, 2, {"fault": "die", "which": 2})
    envs.reset(range(4))
    with pytest.raises(WorkerDied, match=r"environment worker 1 .*SIGKILL.* at environment 2 of 2..3"):
        _steps(envs, 3)


@pytest.mark.parametrize("fault", ["", "hang"], ids=["waiting", "in a hung step"])
def test_workers_end_when_the_learner_is_killed(fault: str) -> None:
    code = f"""
import os, time, numpy as np
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.envs.embodied.vector import VectorEnv
envs = VectorEnv(EnvDescription("{TOY}", dict(fault="{fault}", at=1)), 2, 2)
envs.reset([0, 1])
envs.send(np.zeros((2, 2)))
print(*envs.worker_pids, flush=True)
time.sleep(100)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    learner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    pids = [int(pid) for pid in learner.stdout.readline().split()]
    assert len(alive(pids)) == 2
    learner.kill()
    learner.wait()
    until(lambda: not alive(pids))


def test_workers_do_not_load_torch(make) -> None:
    envs = make("HalfCheetah-v5", 2, 1)
    envs.reset([0, 1])
    libraries = Path(f"/proc/{envs.worker_pids[0]}/maps")
    if not libraries.exists():
        pytest.skip("no /proc on this system")
    text = libraries.read_text()
    assert "mujoco" in text
    assert "libtorch" not in text


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_workers_run_on_cpus_of_their_own() -> None:
    cpus = os.sched_getaffinity(0)
    for num_workers in (1, len(cpus)):
        shares = cpu_shares(num_workers)
        assert set().union(*shares) == cpus
        assert sum(map(len, shares)) == len(cpus)
    assert cpu_shares(len(cpus) + 1) == [set()] * (len(cpus) + 1)


def test_a_deprecation_in_a_model_file_is_shown_once_per_run() -> None:
    code = """
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.envs.embodied.vector import VectorEnv
for workers, names in ((0, ("HalfCheetah-v5", "Hopper-v5", "HalfCheetah-v5")), (2, ("HalfCheetah-v5",))):
    for name in names:
        for kwargs in ({}, {"render_mode": "rgb_array"}):  # stepped here, and by Gymnasium
            envs = VectorEnv(EnvDescription(name, kwargs), 2, workers)
            envs.reset([0, 1])
            envs.close()
"""
    environment = {name: value for name, value in os.environ.items() if "DEPRECATIONS" not in name}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    shown = done.stderr.splitlines()
    assert done.stdout == ""
    # MuJoCo 3 has nothing to say about these files
    assert len(shown) == (1 if int(mujoco.__version__.split(".")[0]) >= 4 else 0), done.stderr
    assert all("HalfCheetah-v5" in line and "settotalmass" in line for line in shown)
    assert not Path("MUJOCO_LOG.TXT").exists()


def test_other_warnings_about_a_model_are_passed_on_each_time(caplog: pytest.LogCaptureFixture) -> None:
    with deprecations_once(find_spec(EnvDescription("Hopper-v5"))):
        for _ in range(2):
            mujoco.get_mju_user_warning()("the mass of the thigh is odd")
    assert caplog.text.count("the mass of the thigh is odd") == 2


def test_actions_that_are_not_finite_are_refused(make) -> None:
    envs = make(TOY, 3, 0)
    envs.reset(range(3))
    actions = _actions(envs)
    actions[1, 0] = np.nan
    with pytest.raises(Diverged, match=r"environments \[1\]"):
        envs.send(actions)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "expected"),
    [
        ("HalfCheeta-v5", {}, "HalfCheetah-v5"),
        ("no_such_module:Env-v0", {}, "no_such_module"),
        ("CartPole-v1", {"gravitas": 3}, "gravitas"),
        ("toy_envs:WholeActions-v0", {}, r"(?s)action space of .*Box of floats"),
    ],
)
def test_bad_configs_say_what_to_change(env_id: str, kwargs: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        VectorEnv(EnvDescription(env_id, kwargs), 2)
    assert caught.value.exit_code == 2


def test_both_unusable_spaces_are_listed_and_too_many_workers_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        VectorEnv(EnvDescription("toy_envs:OddSpaces-v0"), 2)
    observation, action = caught.value.problems
    assert observation.key == action.key == "env.id"
    assert observation.message == "observation space of toy_envs:OddSpaces-v0 cannot be used"
    assert (observation.value, observation.allowed) == (
        "Sequence(Discrete(2), stack=False)",
        "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them",
    )
    assert "FlattenObservation" in observation.hint
    assert action.message == "action space of toy_envs:OddSpaces-v0 cannot be used"
    assert (action.value, action.allowed) == (
        "Tuple(Discrete(2), Discrete(2))",
        "Discrete, MultiDiscrete, MultiBinary, Box of floats",
    )


@pytest.mark.parametrize(
    ("binary", "counts", "rewards"),
    [(False, (2, 3), [50.0, 62.0]), (True, (2, 2, 2, 2), [10.0, 1101.0])],
)
def test_several_choices_reach_the_environment_in_its_shape(make, num_workers: int, binary, counts, rewards) -> None:
    envs = make("toy_envs:Choices-v0", 2, num_workers, {"binary": binary})
    assert envs.action_space == ActionSpace("multi_discrete", sum(counts), counts)
    envs.reset([0, 1])
    chosen = np.array([[0, 0, 1, 0], [1, 1, 0, 1]]) if binary else np.array([[0, 0], [1, 2]])
    assert envs.step(chosen).rewards.tolist() == rewards


def test_an_observation_that_is_not_of_its_space_is_named(make, num_workers: int) -> None:
    envs = make("toy_envs:OtherShape-v0", 2, num_workers)
    with pytest.raises(WorkerError, match=r"environment 0 .* in reset:\nan observation of shape \(1,\).*\(1, 2\)"):
        envs.reset([0, 1])
    envs = make("toy_envs:OtherStep-v0", 2, num_workers)
    envs.reset([0, 1])
    shapes = r"an observation of shape \(1,\); its observation_space has shape \(1, 2\)"
    with pytest.raises(WorkerError, match=rf"environment 0 \(toy_envs:OtherStep-v0\) failed in step:\n{shapes}"):
        envs.step(_actions(envs))


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("PickCube-v1", []),
        ("CartPol-v1", ["CartPole-v1", "CartPole-v0"]),
        ("cartpole", ["CartPole-v1", "CartPole-v0"]),
        ("Pusher-v9", ["Pusher-v5"]),
    ],
)
def test_similar_ids_have_similar_names_whatever_their_versions(wrong: str, near: list[str]) -> None:
    assert sorted(similar_ids(wrong, ["CartPole-v0", "CartPole-v1", "Pusher-v5", "Ant-v5"])) == sorted(near)


def test_environments_share_no_arguments(make) -> None:
    kwargs = {"places": [1, 2, 3]}
    envs = make("toy_envs:Route-v0", 3, 0, kwargs)
    assert envs.reset(range(3))[:, 0].tolist() == [2, 2, 2]
    assert kwargs == {"places": [1, 2, 3]}


def test_the_worker_on_the_own_cpu_is_woken_last(make, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = make(TOY, 3, 3)
    workers, woken = envs._workers, []
    monkeypatch.setattr(workers, "_cpus", [{0, 1}, {2, 3}, {4, 5}])
    for member in workers._members:
        monkeypatch.setattr(member, "send_step", lambda member=member: woken.append(member._index))
    for here, order in ((2, [0, 2, 1]), (1, [1, 2, 0]), (-1, [0, 1, 2])):
        monkeypatch.setattr(worker_processes, "_current_cpu", lambda here=here: here)
        workers.send_step(range(3))
        assert woken == order
        woken.clear()
    monkeypatch.undo()
    envs.reset(range(3))
    assert not envs.step(_actions(envs)).invalid.any()
