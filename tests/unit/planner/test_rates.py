"""The stored measurement of a machine: what a plan reads of it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError
from rl_platform.placement.estimates.hardware import device_of
from rl_platform.placement.inventory import Inventory, Node
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.calibration import stored_basis
from rl_platform.planner.rates import (
    CPU_SHARE,
    FORM,
    HOST_LINK,
    Rates,
    data_sheet,
    fingerprint,
    machine_file,
    measured_rates,
    stored_machine,
)
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.report_json import as_tree
from rl_platform.planner.report_text import report_text

ROOT = Path(__file__).parents[3]
LAPTOP = Inventory((Node("laptop", 0, cpus=2, memory=2**35),), "detected")
POINTS = [[1, 1e9], [100, 4e10]]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path))
    return tmp_path


def config_of(name: str = "reasoning/ppo.yaml", *overrides: str) -> Config:
    return load_config(ROOT / "configs" / name, overrides).config


def store(**changes: Any) -> None:
    tree = {
        "form": FORM,
        "date": "2026-01-02",
        "matrix": {"float32": {"256": POINTS}},
        "memory": 1e10,
        "elements": 1e-10,
        "launch": 1e-3,
        "decode_layer": 1e-4,
        "decode_sequence": 1e-5,
        "overheads": {"generate": [0.01, 1e-4], "train": [0.02, 2e-4]},
        "disk": 1e8,
        "start": 7.0,
        "all_reduce": {},
        "environments": {},
        "policies": {},
        "prompts": {},
    }
    file = machine_file("cpu")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(tree | changes))


def report(config: Config, machines: Inventory = LAPTOP) -> Report:
    return plan_report(config, schedule(config.cluster, machines), machines, stored_basis(config, machines))


def test_a_later_plan_reads_rates_and_prompts_and_shows_their_date() -> None:
    config = config_of()
    before = report(config)
    assert "rates: of data sheets; --plan=calibrate measures this machine" in report_text(before)
    store(prompts={fingerprint(config, "data"): [10, 12, 14]})
    after = report(config)
    assert after.lengths.prompts == (10, 12, 14)
    assert after.seconds != before.seconds
    text = report_text(after)
    assert "rates of this machine, measured on 2026-01-02" in text
    assert "lengths: prompts 12 tokens (a sample of the data), responses 12 (their limit)" in text
    step: Any = as_tree(after)["step"]
    assert step["lengths"] == {"prompt": 12, "response": 12}
    assert step["rates"] == "rates of this machine, measured on 2026-01-02"
    assert report(config_of("reasoning/ppo.yaml", "data.max_prompt_length=65")).lengths.prompt == 33  # other prompts


def test_a_measured_link_to_host_memory_replaces_the_usual_one() -> None:
    config, device = config_of(), device_of(LAPTOP)
    for changes, rate in (({}, HOST_LINK), ({"host": 5e10}, 5e10)):
        store(**changes)
        machine = stored_machine(device, LAPTOP)
        assert machine is not None
        assert measured_rates(machine, device, config, 1.0).host == rate


def test_validation_checkpoints_and_start_have_their_share_of_a_step() -> None:
    found = report(config_of())
    work = {one.name: one for one in found.other_work}
    assert {name: one.steps for name, one in work.items()} == {"validation": 5, "checkpoint": 10, "start": 20}
    assert found.mean_seconds == pytest.approx(found.seconds + sum(one.seconds / one.steps for one in work.values()))
    rare = report(config_of("reasoning/ppo.yaml", "runner.val_check_interval=0", "runner.save_interval=0"))
    assert [one.name for one in rare.other_work] == ["start"]


def seconds_of(config: Config) -> dict[str, float]:
    return {span.phase: span.seconds for span in report(config).spans}


def test_rates_of_environments_and_links() -> None:
    config = config_of("embodied/cartpole.yaml")
    usual = seconds_of(config)["collect"]
    store(environments={fingerprint(config, "env"): {"step": 0.1}}, all_reduce={"4": 1e-3, "1001000": 2e-3})
    env = config.env
    slow = seconds_of(config)["collect"]
    act = data_sheet(device_of(LAPTOP)).act
    assert slow == pytest.approx(env.rollout_steps * (env.num_envs * 0.1 / max(1, env.num_workers) + act))
    assert slow > usual
    basis = stored_basis(config, LAPTOP)
    assert basis.rates is not None
    assert (basis.rates.transfer, basis.rates.link) == (1e-3, pytest.approx(1.001e9))


def test_rates_of_an_embodied_policy_hold_for_that_policy() -> None:
    config = config_of("embodied/cartpole.yaml", "algorithm.ppo_epochs=3")
    store(policies={fingerprint(config, "policy"): {"collect": 0.5, "evaluate": 0.25, "update": 2.0}})
    seconds, env = seconds_of(config), config.env
    rows = env.num_envs * env.rollout_steps
    assert seconds["collect"] == env.rollout_steps * 0.5
    assert seconds["log-probs"] == rows * 0.25
    assert seconds["train actor"] == 3 * (rows // config.data.mini_batch_size) * 2.0
    longer = seconds_of(config_of("embodied/cartpole.yaml", "env.rollout_steps=64"))
    assert longer["collect"] == 64 * 0.5
    for change in ("actor.model.hidden_sizes=[8]", "data.mini_batch_size=16"):
        other = config_of("embodied/cartpole.yaml", change)
        steps = other.algorithm.ppo_epochs * (rows // other.data.mini_batch_size)
        assert seconds_of(other)["train actor"] < steps * 0.5  # of data sheets


def test_other_physics_and_backends_are_other_environments() -> None:
    backends = ("mujoco", "mujoco_warp", "own.py:One", "own.py:Two")
    names = {
        fingerprint(config_of("embodied/cartpole.yaml", f"env.kwargs={{key: {key}}}"), "env")
        for key in ("a1b2", "c3d4")
    }
    config = config_of("embodied/cartpole.yaml")
    names |= {fingerprint(config.changed({"env.backend": backend}), "env") for backend in backends}
    assert len(names) == 6
    assert not any("a1b2" in name for name in names)  # an argument may be a secret


def test_a_worker_has_a_share_of_the_cores_and_gpus_have_their_own_file(plans: Any) -> None:
    store()
    halves = Inventory((Node("laptop", 2, cpus=2, memory=2**35, emulated=True),), "detected")
    whole, half = (stored_basis(config_of(), machines).rates for machines in (LAPTOP, halves))
    assert whole is not None
    assert half is not None
    assert half.flops("float32", 100, 64) == whole.flops("float32", 100, 64) / 2 == 2e10
    config = plans.config()
    assert stored_basis(config, Inventory((Node("n", 8),), gpu="h100")).rates is None


def test_rates_between_measured_rows_are_interpolated_and_clamped() -> None:
    rates = Rates({"float32": {64: [(1, 1.0), (100, 3.0)], 1024: [(1, 10.0), (100, 30.0)]}}, 0.5, 1.0, 1.0, 1.0)
    assert [rates.flops("float32", rows, 64) for rows in (0.1, 1, 10, 100, 9999)] == [0.5, 0.5, 1.0, 1.5, 1.5]
    assert rates.flops("bfloat16", 1, 2000) == 5  # of the nearest width; float32 where a type was not measured
    device = device_of(LAPTOP)
    assert data_sheet(device).flops("float32", 7, 7) == pytest.approx(CPU_SHARE * device.fp32)


def test_a_plan_needs_no_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(tmp_path / "file"))
    assert stored_basis(config_of(), LAPTOP).rates is None
    monkeypatch.delenv("RL_PLATFORM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert stored_basis(config_of(), LAPTOP).rates is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"disk": 0}, "disk: Input should be greater than 0"),
        ({"matrix": {"float32": {}}}, "matrix.float32: Dictionary should have at least 1 item"),
        ({"environments": None}, "environments: Input should be a valid dictionary"),
        ({"prompts": {"0": []}}, "prompts.0: List should have at least 1 item"),
        ({"all_reduce": {"x": 1}}, "all_reduce.x.[key]: Input should be a valid integer"),
    ],
)
def test_a_measurement_with_a_wrong_value_is_refused(change: dict[str, object], reason: str) -> None:
    store(**change)
    with pytest.raises(ConfigError) as raised:
        report(config_of())
    assert f"the measurement of this machine cannot be read: {reason}" in str(raised.value)


@pytest.mark.parametrize("text", ["{", '{"form": 0}', "[]", f'{{"form": {FORM}}}'])
def test_a_damaged_measurement_is_refused(text: str) -> None:
    store()
    machine_file("cpu").write_text(text)
    with pytest.raises(ConfigError, match="--plan=calibrate: the measurement of this machine cannot be read") as raised:
        report(config_of())
    assert "delete it, or measure again" in str(raised.value)
