"""`--check`, `--plan` and `--rehearse` refuse a wrong environment of another interpreter with the line to type."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest

from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.build_problems.build_failure import build_problem
from rl_platform.envs.embodied.build_problems.find_failure import find_problem
from rl_platform.envs.embodied.build_problems.simulator_packages import SIMULATORS, simulator_of
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.launch.start_checks.policy_fit import policy_problems

ROOT = Path(__file__).parents[3]
CARTPOLE = ROOT / "configs" / "embodied" / "cartpole.yaml"
ARM = """
import gymnasium
import numpy as np
from rl_platform.envs.embodied.suites.names import check_name


class Arm(gymnasium.Env):
    max_path_length = 10
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, task, cameras=(), wide=False, file="arm.py"):
        open(file).close()
        check_name("task", task, ["lift", "push"])
        for camera in cameras:
            check_name("cameras", camera, ["front", "side"], cameras)
        if wide:
            self.observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
"""
SETTINGS = ("env.id=arm.py:Arm", "env.kwargs.task=lift", f"env.python={sys.executable}", "env.num_workers=1")
TASKS = "env.tasks=[{name: one, kwargs: {task: push}}, {name: two, kwargs: {%s}}]"


@pytest.fixture(autouse=True)
def arm(folder: Path) -> None:
    (folder / "arm.py").write_text(ARM)


def test_a_class_of_the_module_may_be_nearer_than_a_registered_name() -> None:
    problem = find_problem("arms:Rech", SimpleNamespace(Reach=object), gymnasium.error.NameNotFound("not registered"))
    assert problem is not None
    assert problem.hint == "did you mean Reach? env.id=arms:Reach"


@pytest.mark.parametrize("mode", ["--check", "--plan", "--rehearse"])
def test_a_name_that_the_simulator_lacks_is_refused(mode: str, command) -> None:
    ended = command(CARTPOLE, *SETTINGS, "env.kwargs.task=lit", mode)
    assert ended.code == 2, ended.err
    assert "env.kwargs.task: the simulator has nothing of this name" in ended.err
    assert "did you mean lift? env.kwargs.task=lift" in ended.err
    assert "allowed: lift, push" in ended.err


@pytest.mark.parametrize(
    ("settings", "key", "text"),
    [
        (["env.kwargs.cameras=[side, fron]"], "env.kwargs.cameras", "env.kwargs.cameras='[side, front]'"),
        (["env.kwargs.speed=1"], "env.kwargs", "remove it: ~env.kwargs.speed"),
        (["env.id=arm.py:Amr"], "env.id", "did you mean Arm? env.id=arm.py:Arm"),
        (["env.kwargs.file=mesh.stl"], "env.python", "No such file or directory: 'mesh.stl'"),
        (["actor.model.action_distribution=squashed"], "actor.model.action_distribution", "have none"),
        (["actor.model.type=cnn"], "actor.model.type", "else actor.model.type: mlp"),
        ([TASKS % "task: lif", "env.evaluation.episodes=8"], "env.tasks[1].kwargs.task", "did you mean lift?"),
        ([TASKS % "wide: true", "env.evaluation.episodes=8"], "env.tasks[1].kwargs", "value: observation_shape "),
        (["env.python=manipulatoin"], "env.python", "did you mean manipulation? env.python=manipulation"),
    ],
)
def test_the_check_refuses_with_the_key_and_the_line_to_type(
    settings: list[str], key: str, text: str, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    ended = command(CARTPOLE, *SETTINGS, *settings, "--check")
    assert (ended.code, f"{key}:" in ended.err, text in ended.err) == (2, True, True), ended.err


@pytest.mark.parametrize(
    ("python", "text"),
    [
        ("manipulation", "`rl-platform environment manipulation` makes it"),
        ("no/bin/python", "no such interpreter"),
        ("manipulation/bin/python", "no such interpreter"),  # a path is no misspelt name
    ],
)
def test_the_check_says_that_an_interpreter_is_not_there(
    python: str, text: str, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    ended = command(CARTPOLE, *SETTINGS, f"env.python={python}", "--check")
    assert ended.code == 0, ended.err
    assert "the environment was not checked: env.python" in ended.out
    assert text in ended.out
    ended = command(CARTPOLE, *SETTINGS, f"env.python={python}")
    assert (ended.code, text in ended.err) == (2, True), ended.err


def test_the_check_says_that_the_demonstrations_are_not_there(command) -> None:
    ended = command(CARTPOLE, "runner.warm_start={demonstrations: arm.hdf5}", "--check")
    assert ended.code == 0, ended.err
    text = "missing here, so that a start is refused: runner.warm_start.demonstrations: no such file or folder"
    assert text in ended.out


def test_a_simulator_that_is_not_installed_here_is_not_checked(command) -> None:
    ended = command(CARTPOLE, "env.id=metaworld:Meta-World/MT1", "--check")
    assert ended.code == 0, ended.err
    assert "the environment was not checked: env.id" in ended.out
    assert "run `rl-platform environment manipulation` once" in ended.out


@pytest.mark.parametrize("known", SIMULATORS.values(), ids=SIMULATORS)
def test_each_simulator_has_the_line_that_installs_it(known, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("rl_platform.envs.embodied.build_problems.simulator_packages.version", version)
    name = f"rl_platform.envs.embodied.suites.{known.part}:Task"
    assert simulator_of(name) is known
    problem = build_problem(name, "Task", {}, ModuleNotFoundError("No module named 'it'", name="it"))
    if known.page:
        assert known.page in known.install_line()
        return
    assert (problem.key, problem.hint) == ("env.python", known.install_line())
    line = "rl-platform environment manipulation" if known.made else f"{known.part}/bin/python -m pip install"
    assert line in known.install_line()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("libGL.so.1: cannot open shared object file: No such file"), "`apt install libgl1`"),
        (AttributeError("'NoneType' object has no attribute 'glGetError'"), "apt install libosmesa6"),
        (ImportError("Cannot initialize a EGL device display."), "apt install libegl1 libgl1"),
        (ValueError("ParseXML: Error opening file 'arm.xml'"), "--force-reinstall --no-deps robosuite==1.5.2"),
    ],
)
def test_a_library_or_file_that_is_missing_has_the_line_that_installs_it(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = SIMULATORS["robosuite"].versions
    monkeypatch.setattr("rl_platform.envs.embodied.build_problems.simulator_packages.version", versions.__getitem__)
    problem = build_problem("rl_platform.envs.embodied.suites.robosuite:Task", "Task", {"task": "Lift"}, error)
    assert (problem.key, text in problem.hint) == ("env.python", True), problem


def test_squashed_actions_need_a_range() -> None:
    spaces = EnvSpaces((3,), ActionSpace("continuous", 2), (2,), (-1.0, 0.0), (1.0, 0.0))
    (problem,) = policy_problems(Model(action_distribution="squashed"), spaces)
    assert problem.key == "actor.model.action_distribution"
    assert "both of component 1 are equal" in problem.message
    assert policy_problems(Model(), spaces) == []
