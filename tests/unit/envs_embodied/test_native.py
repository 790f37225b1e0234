"""Environments stepped all at once do what Gymnasium's do one by one."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco import mujoco_env
from gymnasium.wrappers import TransformAction

from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
from rl_platform.envs.embodied.mujoco import physics
from rl_platform.envs.embodied.mujoco.native import NativeEnvs
from rl_platform.envs.embodied.mujoco.tasks import TASKS
from rl_platform.envs.embodied.saved_states import env_state
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError

NUM_ENVS, STEPS = 3, 400
IDS = [f"{task.__name__}-v5" for task in TASKS.values()]
KWARGS = [
    ("HalfCheetah-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.3, "frame_skip": 2}),
    ("Swimmer-v5", {"exclude_current_positions_from_observation": False, "forward_reward_weight": 2.0}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_reward": 2, "healthy_state_range": (-5.0, 5.0)}),
    ("Walker2d-v5", {"healthy_z_range": (1.0, 1.5), "healthy_angle_range": (-0.3, 0.3), "reset_noise_scale": 0.05}),
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "main_body": "front_left_leg", "contact_cost_weight": 0.1}),
    ("Ant-v5", {"exclude_current_positions_from_observation": False, "healthy_z_range": (0.4, 0.9)}),
    ("Ant-v5", {"contact_force_range": (-0.3, 0.2), "contact_cost_weight": 1.0, "terminate_when_unhealthy": False}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "include_cvel_in_observation": False}),
    ("Humanoid-v5", {"contact_cost_weight": 0.01, "contact_cost_range": (0.0, 0.5), "ctrl_cost_weight": 1}),
    ("Humanoid-v5", {"include_qfrc_actuator_in_observation": False, "include_cfrc_ext_in_observation": False}),
    ("HumanoidStandup-v5", {"impact_cost_weight": 0.01, "impact_cost_range": (1.0, 2.0), "ctrl_cost_weight": 0.5}),
    ("InvertedPendulum-v5", {"reset_noise_scale": 0.1}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3.0}),
    ("Reacher-v5", {"reward_dist_weight": 2.0, "reward_control_weight": 0.1}),
    ("Pusher-v5", {"reward_near_weight": 2.0, "reward_dist_weight": 0.5, "reward_control_weight": 1.0}),
]


def _compare(env_id: str, kwargs: dict, steps: int, kind: type | None = None, threads: int = 2) -> int:
    """The same seeds and actions for ours and Gymnasium's; returns the number of episodes that ended."""
    # a limit below Gymnasium's own, so that truncations are among what is compared
    description = EnvDescription(env_id, kwargs, max_episode_steps=90)
    theirs = [make_env(description) for _ in range(NUM_ENVS)]
    ours = NativeEnvs(make_env(description), NUM_ENVS, threads, kind)
    everyone, seeds = np.arange(NUM_ENVS), [3, 4, 5]
    first = np.array([env.reset(seed=seed)[0] for env, seed in zip(theirs, seeds, strict=True)])
    np.testing.assert_allclose(ours.reset(everyone, seeds), first, rtol=0, atol=1e-9)
    lengths, ends = np.zeros(NUM_ENVS, np.int64), 0
    rng, space = np.random.default_rng(0), theirs[0].action_space
    for step in range(steps):
        actions = rng.uniform(space.low, space.high, (NUM_ENVS, *space.shape)).astype(np.float32)
        actual = ours.step(actions, lengths)
        expected = [env.step(action)[:4] for env, action in zip(theirs, actions, strict=True)]
        for name, mine, other in zip(("observation", "reward"), actual, zip(*expected, strict=True), strict=False):
            np.testing.assert_allclose(mine, np.array(other), rtol=0, atol=1e-9, err_msg=f"{name} at step {step}")
        assert actual[2].tolist() == [bool(one[2]) for one in expected], f"terminated at step {step}"
        assert actual[3].tolist() == [one[3] for one in expected], f"truncated at step {step}"
        assert not ours.diverged.any()
        lengths += 1
        ended = np.flatnonzero(actual[2] | actual[3])
        if len(ended):
            ends += len(ended)
            begun = np.array([theirs[i].reset()[0] for i in ended])
            np.testing.assert_allclose(ours.reset(ended, [None] * len(ended)), begun, rtol=0, atol=1e-9)
            lengths[ended] = 0
    ours.close()
    return ends


def test_all_of_version_5_is_covered() -> None:
    entries = [spec.entry_point for spec in gymnasium.registry.values() if "envs.mujoco" in str(spec.entry_point)]
    assert {entry.replace(":", ".") for entry in entries if "_v5" in entry} == TASKS.keys()


@pytest.mark.parametrize("env_id", IDS)
def test_steps_with_resets_are_gymnasiums(env_id: str) -> None:
    assert _compare(env_id, {}, STEPS) >= NUM_ENVS * (STEPS // 90)


@pytest.mark.parametrize("kind", [physics.BatchedPhysics, physics.ThreadedPhysics])
@pytest.mark.parametrize(("env_id", "trees"), [("Walker2d-v5", 1), ("Reacher-v5", 2)])
def test_islands_are_looked_for_where_there_can_be_several(env_id: str, trees: int, kind: type) -> None:
    model = make_env(EnvDescription(env_id)).unwrapped.model
    kind(model, 1, 1, 1, ()).close()
    assert model.ntree == trees
    assert bool(model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_ISLAND) == (trees == 1)


def test_no_clock_is_read_within_a_step() -> None:
    def timed() -> bool:
        data = mujoco.MjData(model)
        mujoco.mj_step(model, data)
        return bool(data.timer.duration.any())

    model = make_env(EnvDescription("Hopper-v5")).unwrapped.model
    mujoco.set_mjcb_time(None)  # back to the clock of its Python package
    assert timed()
    VectorEnv(EnvDescription("Hopper-v5"), 1).close()
    assert not timed()


@pytest.mark.parametrize(("env_id", "kwargs"), KWARGS)
def test_arguments_mean_what_they_mean_in_gymnasium(env_id: str, kwargs: dict) -> None:
    assert _compare(env_id, kwargs, 200) >= NUM_ENVS * 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("env_id", [env_id for env_id in IDS if env_id not in ("Pusher-v5", "HumanoidStandup-v5")])
def test_any_number_of_threads_with_a_memory_each(env_id: str, threads: int) -> None:
    _compare(env_id, {}, 100, physics.ThreadedPhysics, threads)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads_of_the_batch(threads: int) -> None:
    pytest.importorskip("mujoco.batch")
    _compare("Hopper-v5", {}, 100, physics.BatchedPhysics, threads)


@pytest.mark.parametrize("env_id", IDS)
def test_the_number_of_environments_does_not_change_a_bit(env_id: str) -> None:
    env = make_env(EnvDescription(env_id))
    many, one = NativeEnvs(env, 5, 2), NativeEnvs(env, 1, 1)
    np.testing.assert_array_equal(many.reset(np.arange(5), range(5))[3:4], one.reset(np.arange(1), [3]))
    rng, space = np.random.default_rng(0), env.action_space
    for step in range(40):
        actions = rng.uniform(space.low, space.high, (5, *space.shape)).astype(np.float32)
        results = many.step(actions, np.full(5, step)), one.step(actions[3:4], np.full(1, step))
        for mine, other in zip(*results, strict=True):
            np.testing.assert_array_equal(mine[3:4], other)


def _spoil(native: NativeEnvs, index: int, position: int, value: float) -> None:
    """Write into the saved state of one simulation: time, then positions, then velocities, and so on."""
    state = native._physics.save(index)
    state[position] = value
    native._physics.restore(index, state)


def _actions(envs: VectorEnv, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (envs.num_envs, envs.action_space.size))


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5", "InvertedPendulum-v5", "Ant-v5", "Humanoid-v5"])
def test_physics_that_diverges_costs_one_episode_of_one_environment(env_id: str) -> None:
    healthy, broken = (VectorEnv(EnvDescription(env_id, max_episode_steps=30), NUM_ENVS) for _ in range(2))
    for envs in (healthy, broken):
        envs.reset(range(NUM_ENVS))
        envs.step(_actions(envs, 0))
    before = broken.observations[1]
    native = broken._blocks[0]._native
    assert isinstance(native, NativeEnvs)
    _spoil(native, 1, 1 + native._physics.now.qpos.shape[1], 1e12)  # MuJoCo starts such a state over by itself
    expected, actual = (envs.step(_actions(envs, 1)) for envs in (healthy, broken))
    assert actual.invalid.tolist() == [False, True, False]
    assert actual.truncated.tolist() == [False, True, False]
    assert not actual.terminated[1]
    assert actual.rewards[1] == 0.0
    np.testing.assert_array_equal(actual.final_observations, [before])
    assert actual.episodes == []
    assert np.isfinite(actual.observations).all()
    for step in range(2, 40):
        for name in ("observations", "rewards", "terminated", "truncated"):
            mine, other = getattr(actual, name), getattr(expected, name)
            np.testing.assert_array_equal(mine[[0, 2]], other[[0, 2]], err_msg=name)
        expected, actual = (envs.step(_actions(envs, step)) for envs in (healthy, broken))
        assert not actual.invalid.any(), "the next episode is a healthy one"


@pytest.mark.parametrize("kind", [None, physics.ThreadedPhysics])
def test_time_that_goes_back_and_states_beyond_all_bounds_are_divergence(kind: type | None) -> None:
    envs = NativeEnvs(make_env(EnvDescription("HalfCheetah-v5", {"frame_skip": 1})), NUM_ENVS, 1, kind)
    envs.reset(np.arange(NUM_ENVS), [0, 1, 2])
    actions, lengths = np.zeros((NUM_ENVS, 6), np.float32), np.zeros(NUM_ENVS, np.int64)
    for _ in range(5):
        envs.step(actions, lengths)
        assert not envs.diverged.any()
        lengths += 1
    _spoil(envs, 0, 0, 0.0)
    _spoil(envs, 2, 1, 9.999e9)  # x, and its speed: MuJoCo looks at them before a step, not after
    _spoil(envs, 2, 1 + 9, 9.999e9)
    envs.step(actions, lengths)
    assert not envs._physics.warnings.any()
    assert envs.diverged.tolist() == [True, False, True]


def test_a_state_of_something_else_is_refused() -> None:
    env = make_env(EnvDescription("Reacher-v5"))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="stepped natively"):
        NativeEnvs(env, 1, 1).restore(0, env_state.save(env))


def test_unknown_wrappers_kinds_and_pictures_are_left_to_gymnasium() -> None:
    cheetah = make_env(EnvDescription("HalfCheetah-v5"))

    class MyCheetah(type(cheetah.unwrapped)):
        pass

    others = [
        TransformAction(cheetah, lambda action: action / 2, None),
        make_env(EnvDescription("HalfCheetah-v5", {"render_mode": "rgb_array"})),
        make_env(EnvDescription("CartPole-v1")),
        MyCheetah(),
    ]
    for env in others:
        assert NativeEnvs.of(env, 2, 1) is None, env
        with pytest.raises(ValueError, match="stepped by Gymnasium"):
            NativeEnvs(env, 2, 1)
    assert NativeEnvs.of(cheetah, 2, 1) is not None


def test_models_with_a_state_that_cannot_be_saved_as_numbers_are_left_to_gymnasium(tmp_path: Path) -> None:
    option = '<option integrator="RK4" timestep="0.002"/>'
    text = (Path(mujoco_env.__file__).parent / "assets/hopper.xml").read_text()
    assert option in text
    sleeps = '<option integrator="implicitfast" timestep="0.002"><flag sleep="enable"/></option>'
    for name, replacement in (("same", option), ("sleeps", sleeps)):
        (tmp_path / f"{name}.xml").write_text(text.replace(option, replacement))
    same, sleepy = (
        make_env(EnvDescription("Hopper-v5", {"xml_file": f"{tmp_path}/{n}.xml"})) for n in ("same", "sleeps")
    )
    assert NativeEnvs.of(same, 2, 1) is not None
    assert NativeEnvs.of(sleepy, 2, 1) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_environments_left_to_gymnasium_are_stepped_by_it(workers: int, closes) -> None:
    envs = closes(VectorEnv(EnvDescription("HalfCheetah-v5"), 2, workers, render_mode="rgb_array"))
    native = VectorEnv(EnvDescription("HalfCheetah-v5"), 2)
    np.testing.assert_array_equal(envs.reset([0, 1]), native.reset([0, 1]))
    actions = _actions(envs, 0)
    np.testing.assert_array_equal(envs.step(actions).observations, native.step(actions).observations)


def test_arguments_that_gymnasium_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="ctrl_cost_wait"):
        VectorEnv(EnvDescription("Ant-v5", {"ctrl_cost_wait": 0.1}), 2)
