"""Simulators that need MuJoCo 3, in an interpreter of their own: shipped configs, seeds and saved states.

Skipped unless `rl-platform environment manipulation` has made it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import imageio.v2 as imageio
import numpy as np
import pytest
from child_forks import forked_children

from rl_platform.config import load_config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.launch.tools.simulators import is_made
from rl_platform.metrics import read_metrics

NAME = "manipulation"
pytestmark = pytest.mark.skipif(not is_made(NAME), reason="rl-platform environment manipulation was not run")

CONFIGS = Path(__file__).parents[2] / "configs" / "embodied"
EXAMPLES = Path(__file__).parents[2] / "examples"
SUITES = "rl_platform.envs.embodied.suites"
TASKS = {  # description, numbers of an observation and of an action, most bytes of a state; 0: states cannot be saved
    "Meta-World": (EnvDescription("metaworld:Meta-World/MT1", {"env_name": "reach-v3", "seed": 1}), 39, 4, 100_000),
    "Gymnasium-Robotics": (EnvDescription("gymnasium_robotics:FetchReachDense-v4"), 16, 4, 100_000),
    "dm-control": (
        EnvDescription(f"{SUITES}.dm_control:Suite", {"domain": "walker", "task": "walk"}),
        24,
        6,
        1_000_000,
    ),
    "dm-control manipulation": (
        EnvDescription(f"{SUITES}.dm_control:Manipulation", {"task": "reach_site_features"}),
        45,
        9,
        0,
    ),
    "robosuite Lift": (EnvDescription(f"{SUITES}.robosuite:Task", {"task": "Lift"}), 60, 7, 0),
    "robosuite Door": (EnvDescription(f"{SUITES}.robosuite:Task", {"task": "Door"}), 64, 7, 0),
}
SMALL = (
    "env={python: manipulation, num_envs: 1, rollout_steps: 100, num_workers: 1, evaluation: {episodes: 1}}",
    "data.mini_batch_size=100",
    "runner.max_steps=1",
    "runner.output_dir=runs/robot",
)
THERE = "OLDEST, FOLDERS ="  # the begin of the code of processes in the simulators' interpreter
# The first environment of robosuite costs a second more than the next one.
IMPORTS = """
import logging
logging.disable(logging.WARNING)
import dm_control.manipulation, dm_control.suite, gymnasium_robotics, metaworld, robosuite
logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
robosuite.make("Lift", robots="Panda", has_renderer=False, has_offscreen_renderer=False, use_camera_obs=False).close()
logging.disable(logging.NOTSET)
"""


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """The simulators are imported once, and not in each of some sixty processes."""
    with pytest.MonkeyPatch.context() as patch, forked_children(THERE, IMPORTS):
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS"):
            patch.setenv(name, "1")  # as in a worker, so that inspections and workers are forks of one process
        yield


@pytest.mark.parametrize("name", ["metaworld_reach", "fetch_reach"])
def test_the_shipped_config_trains_reports_success_and_draws_its_evaluation(
    name: str, command, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("rl_platform.runtime.child.subprocess", subprocess)  # no forks: each process imports
    given = {"metaworld_reach": TASKS["Meta-World"], "fetch_reach": TASKS["Gymnasium-Robotics"]}[name][0]
    env = [f"env.id={given.id}", *(f"env.kwargs.{key}={value}" for key, value in given.kwargs.items())]
    ended = command(CONFIGS / f"{name}.yaml", *SMALL, *env, "env.max_episode_steps=50", "env.evaluation.video=true")
    assert ended.code == 0, ended.err
    rows = read_metrics("runs/robot")
    for row, names in ((rows[0], ("val",)), (rows[1], ("val", "env"))):
        for kind in names:
            assert 0.0 <= row[f"{kind}/success_at_end"] <= row[f"{kind}/success_once"] <= 1.0
    ended = command("--eval", "latest", "env.evaluation.video=false")
    assert ended.code == 0, ended.err
    assert "success_once" in ended.out
    video = folder / "runs" / "robot" / "evaluation.mp4"
    if not video.exists():
        request.getfixturevalue("drawing")  # skips the test on a machine that draws nothing
    frames = imageio.mimread(video)
    assert len(frames) > 10  # every second one of 50 steps; an episode may end earlier
    assert np.std(frames[0]) > 10, "a picture"
    assert not np.array_equal(frames[0], frames[-1])


@pytest.mark.parametrize(
    ("name", "size", "actions"),
    [
        ("dm_cheetah", 17, 6),
        ("dm_humanoid", 67, 21),
        ("dm_reach", 45, 9),
        ("adroit_pen", 45, 24),
        ("fetch_push", 31, 4),
        ("metaworld_push", 39, 4),
        ("metaworld_drawer", 39, 4),
        ("robosuite_door", 17, 7),
    ],
)
def test_the_task_of_the_shipped_config_is_built(name: str, size: int, actions: int) -> None:
    spaces = inspect_env(EnvDescription.of(load_config(CONFIGS / f"{name}.yaml").config.env)).spaces
    assert (spaces.observation_size, spaces.action.size) == (size, actions)


def test_a_pose_that_is_drawn_again_is_not_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """Inverse kinematics misses the first pose of seeds 61, 62 and 64."""
    with closing(VectorEnv(EnvDescription.of(load_config(CONFIGS / "dm_reach.yaml").config.env), 1, 1)) as envs:
        for seed in (61, 62, 64):
            envs.reset([seed])
    assert "Failed to converge" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "episodes", "noise"),
    [
        ("fetch_push", 4, 0.2),
        ("metaworld_push", 4, 0.2),
        ("metaworld_drawer", 4, 0.2),
        ("dm_reach", 4, 0.2),
        ("robosuite_door", 2, 0.0),  # with noise the first two episodes of the expert fail
    ],
)
def test_demonstrations_of_a_scripted_expert_start_the_shipped_config(
    name: str, episodes: int, noise: float, script: Callable[[Path], ModuleType], command, folder: Path
) -> None:
    pytest.importorskip("h5py")
    example = script(EXAMPLES / "demonstrations.py")
    kind = name.removeprefix("robosuite_")
    task = example.TASKS[kind]
    assert example.record(f"{kind}.hdf5", task, episodes, noise, 2) >= 0.5
    env = [f"env.id={task.env.id}", *(f"env.kwargs.{key}={value}" for key, value in task.env.kwargs.items())]
    small = ("env.max_episode_steps=20", "env.rollout_steps=20", "data.mini_batch_size=20")
    ended = command(CONFIGS / f"{name}.yaml", *SMALL, *env, *small, "runner.warm_start.updates=20")
    assert ended.code == 0, ended.err
    first, last = read_metrics("runs/robot")
    assert np.isfinite([first["val/return"], last["actor/demonstration_nll"]]).all()


def test_ten_tasks_have_their_number_in_the_observation_and_two_in_a_run_metrics_of_their_own(
    command, folder: Path
) -> None:
    env = load_config(CONFIGS / "metaworld_mt10.yaml").config.env
    with closing(VectorEnv(EnvDescription.of(env), len(env.tasks), 1)) as envs:
        observations = envs.reset(range(len(env.tasks)))
    assert np.array_equal(observations[:, -len(env.tasks) :], np.eye(len(env.tasks)))

    tasks = [task.model_dump() for task in env.tasks[::9]]
    small = ("num_envs=2", "num_workers=1", "rollout_steps=20", "max_episode_steps=10", "evaluation={episodes: 2}")
    settings = [*(f"env.{setting}" for setting in small), f"env.tasks={json.dumps(tasks)}", "data.mini_batch_size=20"]
    ended = command(CONFIGS / "metaworld_mt10.yaml", *settings, *SMALL[2:])
    assert ended.code == 0, ended.err
    first, last = read_metrics("runs/robot")
    for task in tasks:
        for row, kind in ((first, "val"), (last, "val"), (last, "env")):
            assert 0.0 <= row[f"{kind}/{task['name']}/success_once"] <= 1.0
            assert np.isfinite(row[f"{kind}/{task['name']}/return"])


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_determines_the_episode_and_a_saved_state_continues(task: str) -> None:
    description, width, actions, most = TASKS[task]
    here = EnvDescription(description.id, description.kwargs, python=NAME)
    with closing(VectorEnv(here, 2, 1)) as first, closing(VectorEnv(here, 2, 2)) as second:
        starts = [envs.reset([5, 6]) for envs in (first, first, second)]
        assert starts[0].shape == (2, width)
        assert np.array_equal(starts[0], starts[1])
        assert np.array_equal(starts[0], starts[2])
        assert not np.array_equal(starts[0][0], starts[0][1])
        draw = np.random.default_rng(0)
        low, high = first.spaces.action_low, first.spaces.action_high
        for _ in range(7):
            given = draw.uniform(low, high, (2, actions))
            before = [envs.step(given).observations for envs in (first, second)]
            assert np.array_equal(*before)
        if not most:
            return
        state = first.state_dict()
        assert max(map(len, state["envs"])) < most
        second.load_state_dict(state)
        for _ in range(60):  # of the Fetch arm: through the end of an episode
            given = draw.uniform(low, high, (2, actions))
            results = [envs.step(given) for envs in (first, second)]
            for name in ("observations", "rewards", "truncated"):
                assert np.array_equal(*(getattr(result, name) for result in results)), name


def test_robosuite_is_seen_by_cameras_and_as_a_state(drawing: dict[str, str], closes) -> None:
    lift = TASKS["robosuite Lift"][0]
    seen = {"cameras": ["agentview", "robot0_eye_in_hand"], "size": 32, "observations": ["robot0_proprio-state"]}
    alone = {"cameras": ["agentview"], "size": 32, "observations": []}
    variables = drawing | {"CUDA_VISIBLE_DEVICES": ""}  # as of a worker without a GPU
    both, one = (
        closes(VectorEnv(EnvDescription(lift.id, lift.kwargs | more, python=NAME), 1, 1, worker_variables=variables))
        for more in (seen, alone)
    )
    assert [(part.name, part.shape, part.image) for part in both.spaces.parts] == [
        ("agentview", (32, 32, 3), True),
        ("robot0_eye_in_hand", (32, 32, 3), True),
        ("state", (50,), False),
    ]
    assert one.spaces.images
    first, image = both.reset([3]), one.reset([3])
    assert np.array_equal(first, both.reset([3]))
    assert image.dtype == np.uint8
    assert np.array_equal(first[0, : image.size], image.ravel().astype(np.float32) * np.float32(1 / 255))
    assert image.reshape(32, 32, 3).std() > 10, "a picture"
    moved = both.step(np.ones((1, 7), np.float32)).observations
    for part in np.split(np.arange(first.size), [image.size, 2 * image.size]):
        assert not np.array_equal(first[0, part], moved[0, part])


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("fetch_reach", ["env.python=nothing"], "`rl-platform environment manipulation`"),
        ("fetch_reach", ["env.python=/nowhere/bin/python"], "no such interpreter"),
        ("dm_walker", ["env.kwargs.domain=wlker"], "did you mean walker? env.kwargs.domain=walker"),
        ("dm_walker", ["env.kwargs.task=fly"], "allowed: run, stand, walk"),
        ("dm_walker", ["env.pixels={width: 64}", "actor.model.type=cnn"], "none of Gymnasium's MuJoCo tasks"),
        ("robosuite_lift", ["~runner.warm_start", "env.kwargs.task=Lift2"], "did you mean Lift? env.kwargs.task=Lift"),
        ("robosuite_lift", ["~runner.warm_start", "env.kwargs.robots=Pandas"], "env.kwargs.robots=Panda"),
        ("robosuite_lift", ["~runner.warm_start", "env.kwargs.robots=[Panda, Sawyre]"], 'value: "Sawyre"'),
        (
            "robosuite_lift",
            ["~runner.warm_start", "env.kwargs.observations=[cube]"],
            "the simulator has nothing of this name",
        ),
        ("robosuite_lift", ["~runner.warm_start", "env.kwargs.cameras=[agentviw]"], "did you mean agentview"),
        ("robosuite_lift", ["runner.warm_start.demonstrations=nothing.hdf5"], "no such file or folder"),
        ("fetch_push", [], "python examples/demonstrations.py fetch_push.hdf5"),
        ("metaworld_push", [], "python examples/demonstrations.py metaworld_push.hdf5"),
        ("metaworld_drawer", [], "python examples/demonstrations.py metaworld_drawer.hdf5"),
        ("dm_reach", [], "python examples/demonstrations.py dm_reach.hdf5"),
        ("robosuite_door", [], "python examples/demonstrations.py door.hdf5"),
        ("metaworld_reach", ["env.kwargs.env_name=reach-v4"], "did you mean reach-v3"),
        ("dm_cheetah", ["env.kwargs.domain=cheetha"], "did you mean cheetah"),
        ("dm_cheetah", ["env.kwargs.task=rum"], "did you mean run"),
        ("metaworld_reach", ["env.kwargs.env_name=reach"], "did you mean reach-v3"),
        ("adroit_pen", ["env.id=gymnasium_robotics:AdroitHandPn-v1"], "did you mean AdroitHandPen-v1"),
        ("metaworld_reach", ["env.kwargs.camera_name=cornr"], "did you mean corner? env.kwargs.camera_name=corner"),
        ("adroit_pen", ["env.kwargs.reward_type=dens"], "did you mean dense? env.kwargs.reward_type=dense"),
        ("fetch_reach", ["env.kwargs.reward_type=dens"], "allowed: dense, sparse"),
    ],
)
def test_wrong_input_is_refused_before_the_run(
    name: str, settings: list[str], text: str, command, folder: Path
) -> None:
    ended = command(CONFIGS / f"{name}.yaml", *settings, "runner.output_dir=runs/robot")
    assert (ended.code, text in ended.err) == (2, True), ended.err
    assert not (folder / "runs" / "robot").exists()


@pytest.mark.parametrize("mode", ["--check", "--plan"])
@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("metaworld_reach", ["env.kwargs.env_name=reach-v4"], "did you mean reach-v3"),
        ("metaworld_reach", ["env.id=metaworld:Meta-World/MT2"], "env.id=metaworld:Meta-World/MT25"),
        (
            "fetch_reach",
            ["env.id=gymnasium_robotics:FetchReachDens-v4"],
            "env.id=gymnasium_robotics:FetchReachDense-v4",
        ),
        ("dm_walker", ["env.kwargs.domain=wlker"], "env.kwargs.domain=walker"),
        ("dm_reach", ["env.kwargs.task=reach_site_feature"], "env.kwargs.task=reach_site_features"),
        ("robosuite_lift", ["env.kwargs.task=Lift2"], "env.kwargs.task=Lift"),
        ("robosuite_lift_camera", ["env.kwargs.cameras=[agentviw]"], "env.kwargs.cameras='[agentview]'"),
        ("robosuite_lift_camera", ["actor.model.type=mlp"], "actor.model.type: cnn"),
    ],
)
def test_the_check_and_the_plan_refuse_what_a_start_refuses(
    mode: str, name: str, settings: list[str], text: str, command, folder: Path
) -> None:
    ended = command(CONFIGS / f"{name}.yaml", *settings, mode)
    assert (ended.code, text in ended.err) == (2, True), ended.err


def test_an_episode_of_each_suite_ends_by_its_limit() -> None:
    limits = {"dm-control": 1_000, "robosuite Lift": 20}
    for task, steps in limits.items():
        description, _, actions, _ = TASKS[task]
        kwargs = description.kwargs | ({"horizon": steps} if "robosuite" in task else {})
        with closing(VectorEnv(EnvDescription(description.id, kwargs, python=NAME), 1, 1)) as envs:
            envs.reset([0])
            results = [envs.step(np.zeros((1, actions))) for _ in range(steps)]
        assert [bool(result.truncated[0]) for result in results] == [False] * (steps - 1) + [True], task
        (episode,) = results[-1].episodes
        assert (episode.length, episode.terminated) == (steps, False)
        assert (episode.success is not None) == ("robosuite" in task)
