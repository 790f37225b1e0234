"""`runner.warm_start`: a policy cloned from a scripted expert, from both kinds of files, and demonstrations in PPO."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from run_results import differences, final_state, logged

from rl_platform.metrics import read_metrics

h5py = pytest.importorskip("h5py", reason="pip install 'rl-platform[demonstrations]'")
pyarrow = pytest.importorskip("pyarrow", reason="pip install 'rl-platform[demonstrations]'")

EPISODES = 20
WARM = "runner.warm_start={demonstrations: demos.hdf5, updates: 1500, mini_batch_size: 128}"
PENDULUM = (
    "embodied.yaml",
    "env={id: Pendulum-v1, num_envs: 4, rollout_steps: 16, evaluation: {episodes: 10}}",
    "actor.model={hidden_sizes: [32, 32], initial_log_std: -1.0}",
    "runner.max_steps=2",
)


def expert(observation: np.ndarray) -> np.ndarray:
    """Swings the pendulum up by its energy, and balances it."""
    cosine, sine, speed = observation
    if cosine > 0.9:
        torque = -10 * np.arctan2(sine, cosine) - 2 * speed
    else:
        torque = -4 * (speed**2 / 6 + 5 * (cosine - 1)) * np.sign(speed or 1.0)
    return np.clip([torque], -2, 2).astype(np.float32)


@pytest.fixture(scope="module")
def episodes() -> list[tuple[np.ndarray, np.ndarray]]:
    """Observations [200,3] and actions [200,1] of each episode of the expert."""
    env, found = gymnasium.make("Pendulum-v1"), []
    for seed in range(EPISODES):
        observation, _ = env.reset(seed=seed)
        seen, chosen = [], []
        for _ in range(200):
            seen.append(observation)
            chosen.append(expert(observation))
            observation, *_ = env.step(chosen[-1])
        found.append((np.array(seen), np.array(chosen)))
    env.close()
    return found


@pytest.fixture
def demonstrations(folder: Path, episodes: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """`demos.hdf5` of robomimic's layout and `lerobot/`, with equal steps in one order."""
    import pyarrow.parquet

    with h5py.File("demos.hdf5", "w") as file:
        for number, (observations, actions) in enumerate(episodes):
            group = file.create_group(f"data/demo_{number}")
            group["actions"], group["obs/angle"], group["obs/speed"] = (
                actions,
                observations[:, :2],
                observations[:, 2],
            )
            group["obs/unused"] = np.zeros((len(actions), 5))
    steps = EPISODES * 200
    features = {"observation.state": {"dtype": "float32", "shape": [3]}, "observation.image": {"dtype": "video"}}
    info = {"codebase_version": "v2.1", "total_episodes": EPISODES, "total_frames": steps, "features": features}
    Path("lerobot/meta").mkdir(parents=True)
    Path("lerobot/meta/info.json").write_text(json.dumps(info))
    chunk = Path("lerobot/data/chunk-000")
    chunk.mkdir(parents=True)
    for number, (observations, actions) in enumerate(episodes):
        table = pyarrow.table({"observation.state": list(observations), "action": list(actions)})
        pyarrow.parquet.write_table(table, chunk / f"episode_{number:06d}.parquet")


NAMED = "runner.warm_start.observations=[angle,speed]"


@pytest.mark.usefixtures("demonstrations")
def test_a_cloned_policy_is_far_better_than_a_random_one_and_both_formats_give_the_same(command) -> None:
    ended = command(*PENDULUM, "runner.output_dir=random")
    assert ended.code == 0, ended.err
    given = {"demos.hdf5": [NAMED], "lerobot": []}
    for name, more in given.items():
        settings = [WARM, f"runner.warm_start.demonstrations={name}", *more]
        ended = command(*PENDULUM, *settings, f"runner.output_dir=of-{name}")
        assert ended.code == 0, ended.err
    random, cloned = read_metrics("random")[0], read_metrics("of-demos.hdf5")[0]
    assert random["val/return"] < -900
    assert cloned["val/return"] > random["val/return"] + 500
    assert cloned["warm_start/nll_last"] < cloned["warm_start/nll_first"] - 0.2
    assert (cloned["warm_start/demonstrations"], cloned["warm_start/transitions"]) == (EPISODES, EPISODES * 200)
    assert "warm_start/updates" not in read_metrics("of-demos.hdf5")[1]
    first, second = (final_state(f"of-{name}", 2) for name in given)
    assert differences(first["actor"], second["actor"]) == []


@pytest.mark.usefixtures("demonstrations")
def test_demonstrations_in_the_loss_hold_the_policy_and_a_stopped_run_resumes(command) -> None:
    """A high learning rate moves the policy away from the demonstrations unless they are in the loss."""
    many = ("actor.optim.lr=0.02", "algorithm.ppo_epochs=8", "runner.warm_start.updates=200", "runner.max_steps=4")
    last = {}
    for coefficient in (1e-9, 1.0):
        settings = (*PENDULUM, WARM, NAMED, f"runner.warm_start.nll_coef={coefficient}", *many)
        ended = command(*settings, f"runner.output_dir=whole-{coefficient}")
        assert ended.code == 0, ended.err
        last[coefficient] = read_metrics(f"whole-{coefficient}")[-1]["actor/demonstration_nll"]
    assert last[1.0] < last[1e-9] - 0.1
    for steps in (2, 4):
        ended = command(*settings, "runner.output_dir=parts", f"runner.max_steps={steps}")
        assert ended.code == 0, ended.err
    assert differences(*(final_state(folder, 4) for folder in ("whole-1.0", "parts"))) == []
    assert [row for row in logged("parts") if row.get("step") == 4][:1] == [
        row for row in logged("whole-1.0") if row.get("step") == 4
    ][:1]


@pytest.mark.usefixtures("demonstrations")
def test_micro_batches_do_not_change_the_update(command) -> None:
    nlls = []
    for rows in ("null", "4"):
        settings = (*PENDULUM, WARM, NAMED, "runner.warm_start.nll_coef=0.5", f"actor.micro_batch_size={rows}")
        ended = command(*settings, f"runner.output_dir=rows-{rows}", "runner.warm_start.updates=20")
        assert ended.code == 0, ended.err
        nlls.append([row["actor/demonstration_nll"] for row in read_metrics(f"rows-{rows}")[1:]])
    assert np.allclose(*nlls, atol=1e-5)


LOOK = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Look(gymnasium.Env):
    observation_space = Dict({"rgb": Box(0, 255, (8, 8, 3), np.uint8), "state": Box(-1, 1, (1,), np.float32)})
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.column = int(self.np_random.integers(8))
        return self.seen(), {}

    def seen(self):
        image = np.zeros((8, 8, 3), np.uint8)
        image[:, self.column] = 255
        return {"rgb": image, "state": np.zeros(1, np.float32)}

    def step(self, action):
        return self.seen(), -abs(float(action[0]) - (self.column / 3.5 - 1)), False, False, {}
"""


def test_a_policy_of_images_is_cloned(command, folder: Path) -> None:
    """The wanted action is where the bright column is."""
    Path("look.py").write_text(LOOK)
    columns = np.arange(8).repeat(4)
    images = np.zeros((32, 8, 8, 3), np.uint8)
    images[np.arange(32), :, columns] = 255
    with h5py.File("demos.hdf5", "w") as file:
        file["data/demo_0/obs/rgb"], file["data/demo_0/obs/state"] = images, np.zeros((32, 1))
        file["data/demo_0/actions"] = columns[:, None] / 3.5 - 1
    ended = command(
        "embodied.yaml",
        "env={id: 'look.py:Look', max_episode_steps: 4, num_envs: 4, rollout_steps: 16, evaluation: {episodes: 10}}",
        "actor.model={type: cnn, cnn: {channels: [8], kernels: [3], strides: [1]}, hidden_sizes: [32]}",
        "actor.model.initial_log_std=-2.0",
        "runner.warm_start={demonstrations: demos.hdf5, observations: [rgb, state], updates: 300, nll_coef: 0.5}",
        "runner.max_steps=1",
        "runner.output_dir=out",
    )
    assert ended.code == 0, ended.err
    cloned = read_metrics("out")[0]["val/return"]
    assert cloned > -0.4, f"{cloned} of 4 steps; a policy that does not look returns about -2"


@pytest.mark.slow
@pytest.mark.usefixtures("demonstrations", "forked_workers")
def test_two_ranks_of_learner_and_environments_clone_and_learn_as_one(command) -> None:
    more = (NAMED, "runner.warm_start.nll_coef=0.5", "runner.warm_start.updates=20")
    nlls, returns = [], []
    for number, placed in enumerate(
        ("{'actor_critic,env,rollout': all}", "{actor_critic: 'all:0-1', env: 'all:0-1', rollout: all}")
    ):
        settings = (*PENDULUM, WARM, *more, f"cluster.component_placement={placed}")
        ended = command(*settings, f"runner.output_dir=ranks-{number}")
        assert ended.code == 0, ended.err
        rows = read_metrics(f"ranks-{number}")
        nlls.append([rows[0]["warm_start/nll_last"], *(row["actor/demonstration_nll"] for row in rows[1:])])
        returns.append(rows[0]["val/return"])
    assert np.allclose(*nlls, atol=1e-4)
    assert np.isclose(*returns, rtol=1e-3)


@pytest.mark.usefixtures("demonstrations")
def test_wrong_demonstrations_are_refused_before_the_run(command) -> None:
    for setting, text in (
        ("demonstrations=nothing.hdf5", "no such file or folder"),
        ("observations=[]", "runner.warm_start.observations=[angle,speed,unused]"),
        ("observations=[angle,velocity]", "it has no observations velocity"),
        ("observations=[angle]", "its observations have 2 numbers"),
    ):
        ended = command(*PENDULUM, WARM, NAMED, f"runner.warm_start.{setting}")
        assert (ended.code, text in ended.err) == (2, True), ended.err
    assert not Path("out").exists()
