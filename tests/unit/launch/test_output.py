"""The folder of a run is the user's alone, unless the user shares it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from rl_platform.config.schema import Config
from rl_platform.errors import DataError
from rl_platform.launch.output import output_folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    runner: dict[str, Any] = {"task_type": "embodied", "output_dir": str(tmp_path / "runs" / "run")}
    placed = {"component_placement": {"actor_critic,env,rollout": "all"}}
    return Config.model_validate({"runner": runner, "cluster": placed, "env": {"id": "CartPole-v1"}})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_from_the_beginning(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    opened: list[int] = []
    monkeypatch.setattr(os, "open", _recording(os.open, opened))
    try:
        with output_folder(config, "a: 1\n") as folder:
            folder.keep()
            assert mode(folder.path) == 0o700
            assert mode(folder.path / "config.yaml") == 0o600
            assert 0o600 in opened, "a file that is narrowed later could be read before"
    finally:
        os.umask(before)


def test_a_shared_folder_stays_shared(config: Config) -> None:
    with output_folder(config, "a: 1\n") as folder:
        folder.keep()
    folder.path.chmod(0o750)
    (folder.path / "config.yaml").chmod(0o640)
    with output_folder(config, "a: 2\n") as folder:
        folder.write_config("a: 2\n", None)
        assert (mode(folder.path), mode(folder.path / "config.yaml")) == (0o750, 0o640)
        assert (folder.path / "config.yaml").read_text() == "a: 2\n"


@pytest.mark.parametrize(("steps", "left"), [(0, "a: 1\n"), (1, "a: 2\n")])
def test_a_launch_that_is_refused_before_its_first_step_leaves_the_config(
    config: Config, steps: int, left: str
) -> None:
    with output_folder(config, "a: 1\n") as folder:
        folder.keep()
    with pytest.raises(DataError):
        _refused(config, steps)
    assert (folder.path / "config.yaml").read_text() == left


def _refused(config: Config, steps: int) -> None:
    with output_folder(config, "a: 2\n") as folder:
        folder.write_config("a: 2\n", None)
        for _ in range(steps):
            folder.keep()
        raise DataError("the checkpoint is of another model")


def _recording(real: Any, modes: list[int]) -> Any:
    def opening(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if str(path).endswith("config.tmp"):
            modes.append(mode)
        return real(path, flags, mode, **options)

    return opening
