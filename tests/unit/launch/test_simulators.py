"""`rl-platform environment NAME`: made once, from exact versions; tried with an empty list of packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.envs.embodied.processes.interpreter import executable
from rl_platform.errors import DataError
from rl_platform.launch.tools import installed, simulators


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of an environment `tiny`, without packages."""
    versions = {"tiny": "# imports: json\n"}
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    monkeypatch.setattr(simulators, "names", lambda: list(versions))
    monkeypatch.setattr(simulators, "_versions", versions.__getitem__)
    return versions


def test_an_environment_is_made_once_and_again_for_other_versions(listed: dict[str, str]):
    assert "installing json" in "".join(simulators.make("tiny"))
    assert simulators.is_made("tiny")
    assert Path(executable("tiny")).is_file()
    assert "is complete" in "".join(simulators.make("tiny"))
    listed["tiny"] = "# imports: no_such_module\n"
    assert not simulators.is_made("tiny")
    with pytest.raises(DataError, match=r"cannot import its packages: .*No module named 'no_such_module'"):
        list(simulators.make("tiny"))
    assert not simulators.is_made("tiny")


def test_an_unknown_name_is_wrong_usage(tool):
    ended = tool("environment", "manipulatoin")
    assert ended.code == 2
    assert "did you mean manipulation?" in ended.err


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("meta-world", "run `rl-platform environment manipulation` once, then set env.python=manipulation"),
        ("robosuite", "run `rl-platform environment manipulation` once, then set env.python=manipulation"),
        ("mani-skill", "maniskill/bin/python -m pip install mani-skill==3.0.1"),
    ],
)
def test_the_name_of_a_simulator_has_the_line_that_installs_it(name: str, line: str, tool):
    ended = tool("environment", name)
    assert ended.code == 2
    assert line in ended.err


def test_the_lists_are_exact_and_name_what_must_be_importable():
    assert simulators.names() == ["manipulation"]
    lines = [line for line in simulators._versions("manipulation").splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert simulators._imports("manipulation") == ["robosuite", "metaworld", "gymnasium_robotics", "dm_control"]
    shown = [each.split()[0] for each in simulators.packages("manipulation")]
    assert shown == [*simulators._imports("manipulation"), "mujoco"]


def test_the_doctor_shows_what_an_environment_has(listed: dict[str, str]):
    listed["tiny"] += "json==1.2\nother==3\nmujoco==3.3.0\n"
    (row,) = installed._simulators()
    assert (row.state, row.fix) == ("missing", "rl-platform environment tiny")
    folder = simulators.environments_folder() / "tiny"
    folder.mkdir(parents=True)
    (folder / simulators.COMPLETE).write_text(listed["tiny"])
    (row,) = installed._simulators()
    assert (row.state, row.text) == ("ok", "json 1.2, mujoco 3.3.0; for env.python: tiny")
