"""`env.python`: environments in another interpreter are those of this one; what is wrong with one is said."""

from __future__ import annotations

import subprocess
import sys
import venv
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.processes import interpreter
from rl_platform.envs.embodied.processes.interpreter import _INSPECT, executable
from rl_platform.envs.embodied.stepping import inspect_tasks
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError
from rl_platform.runtime.child import Child

OWN = """
import sys
import gymnasium
import numpy as np


class Modules(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        names = ("torch", "pydantic", "yaml")
        return np.array([name in sys.modules for name in names], np.float32), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}
"""


@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5"])
def test_the_same_numbers_as_in_this_interpreter(env_id: str):
    here, there = EnvDescription(env_id), EnvDescription(env_id, python=sys.executable)
    assert inspect_env(here) == inspect_env(there)
    with closing(VectorEnv(here, 4, 2)) as first, closing(VectorEnv(there, 4)) as second:  # at least one process
        assert len(second.worker_pids) == 1
        assert np.array_equal(first.reset([1, 2, 3, 4]), second.reset([1, 2, 3, 4]))
        draw = np.random.default_rng(0)
        for number in range(60):
            if number == 30:
                second.load_state_dict(first.state_dict())
            continuous = first.spaces.action.kind == "continuous"
            actions = draw.uniform(-1, 1, (4, 6)) if continuous else draw.integers(0, 2, 4)
            results = [envs.step(actions) for envs in (first, second)]
            for name in ("observations", "rewards", "ended", "final_observations"):
                assert np.array_equal(*(getattr(result, name) for result in results)), name


def test_the_process_imports_none_of_the_platforms_dependencies(folder: Path):
    Path("own.py").write_text(OWN)
    with closing(VectorEnv(EnvDescription("own.py:Modules", max_episode_steps=5, python=sys.executable), 1)) as envs:
        assert envs.reset([0]).tolist() == [[0.0, 0.0, 0.0]]


def test_the_inspection_imports_none_of_them_either():
    blocked = "import sys; sys.modules |= dict.fromkeys(('torch', 'pydantic', 'yaml')); "
    ended = subprocess.run(
        [sys.executable, "-c", f"{blocked}{_INSPECT.rpartition(';')[0]}"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_several_tasks_are_built_by_one_process(monkeypatch: pytest.MonkeyPatch):
    started: list[str] = []

    class Counted(Child):
        def __init__(self, code: str, *given: Any, **options: Any) -> None:
            started.append(code)
            super().__init__(code, *given, **options)

    monkeypatch.setattr(interpreter, "Child", Counted)
    monkeypatch.setattr(interpreter, "_known", {})
    lengths = tuple({"sutton_barto_reward": each} for each in (False, True))
    several = EnvDescription("CartPole-v1", tasks=lengths, python=sys.executable)
    inspect_tasks(several)
    assert {inspect_env(several.of_task(number)).spaces.observation_shape for number in range(2)} == {(4,)}
    assert len(started) == 1
    inspect_tasks(several)
    assert len(started) == 1
    wrong = replace(several, tasks=(lengths[0], {"nope": 1}, {}))
    inspect_tasks(wrong)
    with pytest.raises(ConfigError, match="nope"):
        inspect_env(wrong.of_task(1))


def test_a_process_that_dies_is_replaced():
    with closing(VectorEnv(EnvDescription("CartPole-v1", python=sys.executable), 2, 2, restarts=1)) as envs:
        envs.reset([1, 2])
        envs._workers._members[0].kill()
        results = [envs.step(np.zeros(2, np.int64)) for _ in range(2)]
        assert sum(result.failures for result in results) == 1
        assert results[0].invalid.tolist() == [True, False]


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter without packages."""
    venv.create(tmp_path / "bare", with_pip=False)
    return str(tmp_path / "bare" / "bin" / "python")


def test_what_is_wrong_with_an_interpreter_is_said(bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    expected = {
        "manipulation": (
            f"this environment is not made yet in {tmp_path}/environments",
            "`rl-platform environment manipulation` makes it",
        ),
        "nothing": (f"there is no environment of this name in {tmp_path}/environments", "rl-platform environment"),
        "./no/python": ("no such interpreter", "as path/to/venv/bin/python"),
        "/bin/true": ("cannot run environments: exit code 0", ""),
        bare: (
            "cannot run environments: ModuleNotFoundError: No module named",
            f"{bare} -m pip install numpy gymnasium",
        ),
    }
    for python, (message, hint) in expected.items():
        with pytest.raises(ConfigError) as caught:
            inspect_env(EnvDescription("CartPole-v1", python=python))
        (problem,) = caught.value.problems
        assert problem.key == "env.python"
        assert message in problem.message
        assert python not in problem.allowed
        assert hint in problem.hint


def test_an_environment_that_cannot_be_built_there_is_the_users_problem():
    for description, key in (
        (EnvDescription("Nope-v1", python=sys.executable), "env.id"),
        (EnvDescription("CartPole-v1", {"nope": 1}, python=sys.executable), "env.kwargs"),
    ):
        with pytest.raises(ConfigError) as caught:
            inspect_env(description)
        assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(
    ("versions", "key", "expected"),
    [
        ({}, "env.python", "run `rl-platform environment manipulation` once"),
        (
            {"metaworld": "3.1.1", "mujoco": "4.0.0"},
            "env.python",
            "not tried with mujoco 4.0.0: run `rl-platform",
        ),
        ({"metaworld": "3.1.1", "mujoco": "3.3.0"}, "env.kwargs", "check env.kwargs"),
    ],
)
def test_a_simulator_that_needs_other_packages_is_named(
    versions: dict[str, str], key: str, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The simulator is missing, or its MuJoCo is too new; otherwise the arguments are wrong."""

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    (folder / "my_metaworld.py").write_text("def Reach(**_):\n    raise AssertionError")
    monkeypatch.setattr("rl_platform.envs.embodied.build_problems.simulator_packages.version", version)
    with pytest.raises(ConfigError) as caught:
        inspect_env(EnvDescription("my_metaworld:Reach"))
    (problem,) = caught.value.problems
    assert problem.key == key
    assert expected in problem.hint


def test_a_name_is_an_environment_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    path = tmp_path / "environments" / "mine" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.touch()
    assert executable("mine") == str(path)


@pytest.mark.parametrize(("name", "shown"), [("Pandas", '"Pandas"'), (["Panda"], '["Panda"]')])
def test_an_unknown_name_in_the_arguments_of_a_simulator_is_said_with_the_nearest(
    name: object, shown: str, folder: Path
):
    (folder / "my_arms.py").write_text(
        "from rl_platform.envs.embodied.suites.names import check_name\n"
        "def Lift(robots):\n    check_name('robots', robots, {'Panda': 1, 'Sawyer': 2})\n"
    )
    with pytest.raises(ConfigError) as caught:
        inspect_env(EnvDescription("my_arms.py:Lift", {"robots": name}, python=sys.executable))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.allowed) == ("env.kwargs.robots", shown, "Panda, Sawyer")
    assert problem.hint == "did you mean Panda? env.kwargs.robots=Panda"


def test_a_notice_of_a_package_appears_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Gymnasium-Robotics prints one at each import, also in runs of environments that it does not concern."""
    monkeypatch.setattr("rl_platform.envs.embodied.processes.notices._started", False)
    notice = (
        "from farama_notifications import notifications\n"
        "if 'gymnasium_robotics' in notifications:\n    print('a notice', file=__import__('sys').stderr)\n"
    )
    (folder / "noticed.py").write_text(notice + OWN)
    for _ in range(2):
        envs = VectorEnv(EnvDescription("noticed.py:Modules", max_episode_steps=5, python=sys.executable), 4, 2)
        envs.close()
    assert capfd.readouterr().err.count("a notice") == 1
