"""The shares of physics, inference and optimizer steps in a run's time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_platform.config import load_config
from rl_platform.launch.placed_config import PlacedConfig
from rl_platform.launch.session import run
from rl_platform.launch.tools.timeline import as_text, covered, read_lanes, work_shares
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.runners.watching.trace_file import trace_events
from rl_platform.tracing import TraceSpan

STEPS = [
    TraceSpan("run", "steps", "step", "start", 0.0, 10.0),
    TraceSpan("run", "steps", "step", "step 1", 10.0, 10.0),
    TraceSpan("run", "steps", "step", "step 2", 20.0, 10.0),
    TraceSpan("run", "steps", "step", "step 3", 30.0, 10.0),
]


def lanes_of(tmp_path: Path, *work: tuple[str, str, float, float]):
    """work: lane, name, begin, seconds."""
    spans = [TraceSpan("run", lane, "work", name, begin, seconds) for lane, name, begin, seconds in work]
    calls = [TraceSpan("run", "env[0]", "call", "collect", 10.0, 30.0)]  # a call is no work
    (tmp_path / "trace.json").write_text(json.dumps(trace_events([*STEPS, *calls, *spans])))
    return read_lanes(tmp_path)


def test_what_is_open_at_the_same_time_counts_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 1.0), (0.0, 2.0), (1.0, 3.0), (1.5, 0.5)]) == 5.0


def test_shares_are_of_all_steps_but_the_first(tmp_path: Path) -> None:
    lanes = lanes_of(
        tmp_path,
        ("env[0]", "physics", 12.0, 5.0),  # in the first step
        ("env[0]", "physics", 18.0, 6.0),  # 4 of them in the second
        ("env[1]", "physics", 21.0, 5.0),  # 3 of them beside those
        ("env[0]", "inference", 23.0, 2.0),  # 2 beside them
        ("actor_critic[0]", "optimizer step", 30.0, 4.0),
        ("actor_critic[0]", "optimizer step", 39.0, 6.0),  # 1 before the end
    )
    shares = work_shares(lanes)
    assert shares == pytest.approx({"physics": 6 / 20, "optimizer step": 5 / 20, "inference": 2 / 20, "rest": 9 / 20})
    assert list(shares) == ["physics", "optimizer step", "inference", "rest"]
    assert as_text(shares) == "share of the time: physics 30.0%, optimizer step 25.0%, inference 10.0%; rest 45.0%"


def test_the_verb(tmp_path: Path, tool) -> None:
    lanes_of(tmp_path, ("env[0]", "physics", 21.0, 5.0))
    assert tool("work-shares", tmp_path).out == "share of the time: physics 25.0%; rest 75.0%\n"
    lanes_of(tmp_path, ("actor[0]", "optimizer step", 22.0, 1.0))
    assert tool("work-shares", tmp_path).code == 2


def test_a_run_without_physics_has_none(tmp_path: Path) -> None:
    assert work_shares(lanes_of(tmp_path, ("actor[0]", "optimizer step", 22.0, 1.0))) == {}
    assert as_text({}) == ""


@pytest.mark.parametrize(
    "changes",
    [
        ["env.id=HalfCheetah-v5"],
        ["env.num_workers=2"],
        ["cluster.component_placement={env: all, 'actor_critic,rollout': all}"],
    ],
    ids=["native", "worker processes", "with channels"],
)
def test_a_run_records_its_work(changes: list[str], tmp_path: Path) -> None:
    small = ["runner.max_steps=3", "env.num_envs=4", "env.rollout_steps=16", "data.mini_batch_size=32"]
    quiet = ["env.evaluation={episodes: 1, video: false}", "runner.val_check_interval=0", "env.max_episode_steps=20"]
    config = Path(__file__).parents[3] / "configs/embodied/cartpole.yaml"
    loaded = load_config(str(config), [*small, *quiet, *changes, f"runner.output_dir={tmp_path}"])
    inventory = inventory_for(loaded.config.cluster)
    run(PlacedConfig(loaded, schedule(loaded.config.cluster, inventory), inventory), str(config))
    lanes = read_lanes(tmp_path)
    counts = dict.fromkeys(("physics", "inference", "optimizer step"), 0)
    for event in (event for events in lanes.values() for event in events if event["cat"] == "work"):
        counts[event["name"]] += 1
    assert counts["optimizer step"] == 3 * loaded.config.algorithm.ppo_epochs * 2
    assert counts["physics"] >= 3 * 16
    assert counts["inference"] >= 3 * (16 + 1)  # actions of every step, log-probs and values of the rollout
    physics = [event["ts"] for events in lanes.values() for event in events if event["name"] == "physics"]
    evaluations = [event for event in lanes["runner"] if event["name"] == "validate"]
    assert len(evaluations) == 2
    for event in evaluations:  # the same work as in training
        assert any(event["ts"] < began < event["ts"] + event["dur"] for began in physics)
    shares = work_shares(lanes)
    assert 0 < shares["rest"] < 1
    assert sum(shares.values()) >= 1 - 1e-9
