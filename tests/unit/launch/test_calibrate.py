"""`--plan=calibrate` in small: what it stores, what a later plan reads, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_platform.config import load_config
from rl_platform.errors import ConfigError
from rl_platform.launch.tools import calibrate, config_measurements, device_measurements
from rl_platform.placement.estimates.model_shape import ModelShape

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path / "cache"))
    shape = ModelShape(64, 32, 1, 2, 2, 16, 64, tied=True)
    changes = {"WIDTHS": (16, 32), "ROWS": (1, 4), "BATCHES": (1, 2, 3), "DECODED": 2, "MOST_S": 0.0, "LEAST_S": 1e-6}
    changes |= {"SMALL": shape, "USUAL": shape, "STREAM_BYTES": 2**16}
    for name, value in changes.items():
        monkeypatch.setattr(device_measurements, name, value)
    monkeypatch.setattr(config_measurements, "PROMPTS", 8)
    monkeypatch.setattr(calibrate, "FILE_BYTES", 2**20)
    monkeypatch.setattr(calibrate, "_seconds_of_start", lambda: 3.0)
    monkeypatch.setattr(calibrate, "_run", run_of)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path / "cache"


def run_of(rows: int) -> dict[str, float]:
    """A run whose phases take 1 s, and 10 ms for each of its rows."""
    names = ("sync weights", "generate", "log-probs", "values", "train critic", "train actor")
    phases = dict.fromkeys(names, 1 + 0.01 * rows)
    return {**phases, "step": sum(phases.values()) + 0.5, "prompt": 5.0}


def stored(cache: Path) -> dict[str, Any]:
    (file,) = (cache / "machines").iterdir()
    tree: dict[str, Any] = json.loads(file.read_text())
    return tree


def test_measurements_of_both_tasks_are_stored_and_used(command: Any, small: Path) -> None:
    ended = command("reasoning.yaml", "--plan=calibrate")
    assert ended.code == 0, ended.err
    assert "generation, tokens/s: " in ended.out
    assert "prompts: " in ended.out
    ended = command("embodied.yaml", "--plan=calibrate")
    assert ended.code == 0, ended.err
    assert "steps/s of a worker" in ended.out
    assert "the machine itself was measured on" in ended.out
    tree = stored(small)
    assert len(tree["prompts"]) == len(tree["environments"]) == 1  # the second keeps what the first measured
    (rates,) = tree["environments"].values()
    assert rates["step"] > 0
    (policy,) = tree["policies"].values()
    assert sorted(policy) == ["collect", "evaluate", "update"]
    assert min(policy.values()) > 0
    assert list(tree["tokens_per_second"]) == ["1", "2", "3"]
    assert tree["elements"] >= 0
    assert set(tree["overheads"]) == {"generate", "evaluate", "train", "advantages"}
    for config in ("reasoning.yaml", "embodied.yaml"):
        assert f"rates of this machine, measured on {tree['date']}" in command(config, "--plan").out
    assert "a sample of the data" in command("reasoning.yaml", "--plan").out
    assert f"rates of this machine, measured on {tree['date']}" in command("reasoning.yaml", "--plan=search").out


def test_a_busy_machine_is_measured_again(command: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    assert (
        "so the rates are too low: the next --plan=calibrate measures again"
        in command("reasoning.yaml", "--plan=calibrate").out
    )
    assert command("embodied.yaml", "--plan=calibrate").code == 0
    busy = stored(small)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert "the machine itself" not in command("reasoning.yaml", "--plan=calibrate").out
    quiet = stored(small)
    assert (busy["load"] > 1, quiet["load"]) == (True, 0.0)
    assert quiet["policies"] == busy["policies"], "measurements of configs are kept"
    assert "the machine itself was measured on" in command("reasoning.yaml", "--plan=calibrate").out


@pytest.mark.parametrize("name", ["examples/env_backend.yaml", "configs/embodied/masked_cartpole.yaml"])
def test_environments_and_policies_of_any_kind_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(name, ["env.num_envs=4", "env.rollout_steps=32", "data.mini_batch_size=32"]).config
    assert config_measurements.environment_seconds(config)["step"] > 0
    assert min(config_measurements.policy_seconds(config, torch.device("cpu")).values()) > 0


def test_images_are_drawn_by_the_library_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def with_drawing(uses_mujoco: bool, start: Callable[[dict[str, str]], Any]) -> Any:
        tried.append(uses_mujoco)
        raise config_measurements.CannotDraw("egl: no library")

    monkeypatch.setattr(config_measurements, "with_drawing", with_drawing)
    with pytest.raises(ConfigError, match=r"env\.pixels: nothing can be drawn on this machine: egl: no library"):
        config_measurements.environment_seconds(load_config(ROOT / "configs/embodied/pixels.yaml").config)
    assert tried == [True]


@pytest.mark.slow
def test_all_reduce_between_two_processes() -> None:
    seconds = device_measurements.all_reduce_seconds("cpu")
    assert list(seconds) == [str(size) for size in device_measurements.EXCHANGED]
    assert all(value > 0 for value in seconds.values())


def test_a_cache_folder_that_cannot_be_written_is_refused_at_once(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path / "file"))
    ended = command("reasoning.yaml", "--plan=calibrate")
    assert ended.code == 2
    assert "--plan=calibrate: the measurement cannot be stored" in ended.err
    assert "RL_PLATFORM_CACHE names another folder" in ended.err


def test_declared_gpus_are_not_measured_and_a_run_does_not_calibrate_a_measurement(command: Any) -> None:
    cluster = "cluster={inventory: {nodes: 1, gpus_per_node: 2, gpu: h100}, component_placement: {'actor,critic,rollout,reward': all}}"  # noqa: E501
    ended = command("reasoning.yaml", "--plan=calibrate", cluster)
    assert ended.code == 2
    assert "--plan=calibrate: measures this machine, which does not have the config's GPUs" in ended.err
    ended = command("reasoning.yaml", "--plan=calibrate", "--calibrate", "out")
    assert ended.code == 2
    assert "--calibrate belongs to --plan" in ended.err
