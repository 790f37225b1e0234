"""Environments that raise, hang or die are replaced: what that costs, whom it touches, and when it is too often."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from waiting import HANG_S

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import StepResult, VectorEnv
from rl_platform.errors import Deadline, WorkerDied, WorkerError

TOY = "toy_envs:Toy-v0"
MANY = 1000


@pytest.fixture
def started(make) -> Callable[..., VectorEnv]:
    """started(id, num_envs, num_workers, kwargs, **options): environments that have begun their episodes."""

    def build(*arguments: object, **options: object) -> VectorEnv:
        envs = make(*arguments, **options)
        envs.reset(range(envs.num_envs))
        return envs

    return build


def steps(envs: VectorEnv, count: int) -> list[StepResult]:
    actions = np.full((envs.num_envs, envs.action_space.size), 0.5, np.float32)
    return [envs.step(actions) for _ in range(count)]


def assert_equal_rows(actual: list[StepResult], expected: list[StepResult], rows: list[int]) -> None:
    for one, other in zip(actual, expected, strict=True):
        for name in ("observations", "rewards", "terminated", "truncated", "invalid"):
            assert np.array_equal(getattr(one, name)[rows], getattr(other, name)[rows]), name


@pytest.mark.parametrize("num_workers", [0, 4], ids=["this process", "workers"])
def test_environments_that_raise_once_in_a_hundred_steps(started, num_workers: int, tmp_path: Path) -> None:
    log = tmp_path / "raised"
    flaky = started("toy_envs:Flaky-v0", 8, num_workers, {"p": 0.01, "log": str(log)}, restarts=MANY)
    results = steps(flaky, 200)
    expected = steps(started("toy_envs:Flaky-v0", 8, 0, {}), 200)
    raised = [int(line) for line in log.read_text().split()]
    assert len(raised) >= 3, "the fault was injected"
    assert sum(result.failures for result in results) == sum(result.invalid.sum() for result in results) == len(raised)
    assert_equal_rows(results, expected, [0, 2, 4, 6])
    for result in results:
        assert result.observations.shape == (8, 2)
        assert np.isfinite(result.observations).all()
        assert np.isfinite(result.rewards).all()
        assert (result.truncated | ~result.invalid).all()
        assert not (result.terminated & result.invalid).any()
    for env in (1, 3, 5, 7):  # equal up to the first fault, and alive after it
        first = next((step for step, result in enumerate(results) if result.invalid[env]), len(results))
        assert_equal_rows(results[:first], expected[:first], [env])
        assert sum(result.truncated[env] & ~result.invalid[env] for result in results[first:]) > 0 or first > 190


def test_replacements_after_a_resume_begin_the_same_episodes(started, tmp_path: Path) -> None:
    """The seed of a replacement depends on the failures before the resume too."""
    arguments = "toy_envs:Flaky-v0", 16, 0, {"p": 0.05, "log": str(tmp_path / "raised")}
    envs = started(*arguments, restarts=MANY)
    assert sum(result.failures for result in steps(envs, 15)) > 1
    state = envs.state_dict()
    expected = steps(envs, 40)
    assert sum(result.failures for result in expected) > 1
    resumed = started(*arguments, restarts=MANY)
    steps(resumed, 3)
    resumed.load_state_dict(state)
    assert_equal_rows(steps(resumed, 40), expected, [*range(16)])


@pytest.mark.parametrize("fault", ["hang", "die"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_process_that_hangs_or_dies_is_replaced_alone(started, fault: str, stages: int) -> None:
    options = {"step_timeout_s": 3.0 if fault == "hang" else HANG_S, "restarts": 1, "stages": stages}
    envs = started(TOY, 3, 3, {"fault": fault, "which": 1}, **options)
    if stages == 3:
        envs.step = lambda actions: by_stages(envs, actions)
    expected = steps(started(TOY, 3, 0, {}), 9)
    pids = envs.worker_pids
    results = steps(envs, 2)
    results += steps(envs, 1)  # a second wait would be a second failure
    assert not psutil.pid_exists(pids[1])
    assert [old == new for old, new in zip(pids, envs.worker_pids, strict=True)] == [True, False, True]
    results += steps(envs, 6)
    assert_equal_rows(results, expected, [0, 2])
    assert [result.failures for result in results] == [0, 0, 1] + [0] * 6
    assert [bool(result.invalid[1]) for result in results] == [False, False, True, True] + [False] * 5
    assert results[2].observations[1].tolist() == results[2].final_observations[0].tolist() == [1, 2]
    assert results[3].observations[1].tolist() == [1, 0], "the first observation of the replacement"
    assert [result.observations[1].tolist() for result in results[4:]] == [[1, 1], [1, 2], [1, 3], [1, 4], [2, 0]]
    assert [episode.length for episode in results[8].episodes if episode.env_index == 1] == [5]
    pids = envs.worker_pids
    envs.close()
    envs.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def by_stages(envs: VectorEnv, actions: np.ndarray) -> StepResult:
    """A step of each stage, put together."""
    for stage, rows in enumerate(envs.rows):
        envs.send(actions[rows], stage)
    parts = [envs.receive(stage) for stage in range(len(envs.rows))]
    names = ("observations", "rewards", "terminated", "truncated", "ended", "invalid", "final_observations")
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    failures = sum(part.failures for part in parts)
    return StepResult(**joined, episodes=[one for part in parts for one in part.episodes], failures=failures)


def killed(envs: VectorEnv, index: int) -> None:
    process = psutil.Process(envs.worker_pids[index])
    process.kill()
    process.wait(HANG_S)


def test_a_process_killed_between_steps_is_replaced_with_all_its_environments(started) -> None:
    envs = started(TOY, 4, 2, {}, restarts=1)
    steps(envs, 2)
    killed(envs, 0)
    results = steps(envs, 3)
    assert sum(result.failures for result in results) == 1
    invalid = np.array([result.invalid for result in results])
    assert invalid[:, :2].any()
    assert not invalid[:, 2:].any()
    assert [episode.env_index for episode in results[2].episodes] == [2, 3]
    assert results[0].final_observations.tolist() == [[1, 2]] * 2
    killed(envs, 1)
    with pytest.raises(WorkerDied, match="environment worker 1"):
        steps(envs, 2)


def test_a_process_killed_before_a_save_or_while_it_starts_is_replaced(started) -> None:
    envs = started(TOY, 4, 2, {}, restarts=3)
    steps(envs, 2)
    killed(envs, 1)
    assert len(envs.state_dict()["envs"]) == 4
    assert steps(envs, 1)[0].invalid.tolist() == [False, False, True, True]
    killed(envs, 0)
    envs.send(np.zeros((4, 2), np.float32))
    killed(envs, 0)  # the replacement
    result = envs.receive()
    assert (result.failures, result.invalid.tolist()) == (2, [True, True, False, False])
    assert not steps(envs, 1)[0].invalid.any()
    killed(envs, 0)
    with pytest.raises(WorkerDied, match="environment worker 0"):
        envs.reset(range(4))


@pytest.mark.parametrize("num_workers", [0, 2], ids=["this process", "workers"])
def test_an_environment_that_raises_in_reset(started, num_workers: int) -> None:
    results = steps(started("toy_envs:BadReset-v0", 2, num_workers, {}, restarts=2), 12)
    assert [result.failures for result in results] == [0] * 4 + [2] + [0] * 7
    assert not any(result.invalid.any() for result in results), "the episode before it was over"
    assert results[4].observations.tolist() == [[1, 0]] * 2
    assert sum(len(result.episodes) for result in results) == 4


@pytest.mark.parametrize(
    ("num_envs", "plan", "stopped_at", "reason"),
    [
        (1, [1, 2], 2, "step 1 of an episode, twice in a row: no further restart"),
        (1, [3, 6], 6, "step 3 of an episode, twice in a row: no further restart"),
        (2, [1, 3], 3, "step 1 of an episode, twice in a row: no further restart"),  # call 2 was environment 1
        (1, [1, 3, 6, 7, 8], 8, "step 1 of an episode, twice in a row: no further restart"),
    ],
)
def test_an_error_that_a_replacement_repeats_ends_it(make, num_envs, plan, stopped_at, reason, tmp_path) -> None:
    envs = make("toy_envs:Planned-v0", num_envs, 0, {"plan": plan, "tag": str(tmp_path)}, restarts=10)
    envs.reset(range(num_envs))
    place = r"environment . \(toy_envs:Planned-v0\): RuntimeError at .*toy_envs.py:\d+ in "
    with pytest.raises(WorkerError, match=rf"bug in call {stopped_at}\n{place}{reason}"):
        steps(envs, 20)


def test_an_error_whose_text_raises_is_replaced_and_ends_the_run_as_others(make, tmp_path: Path, caplog) -> None:
    envs = make("toy_envs:Mute-v0", 1, 0, {"plan": [3, 6], "tag": str(tmp_path)}, restarts=10)
    envs.reset([0])
    with pytest.raises(
        WorkerError, match=r"(?s)self.error\(call\).*Raised at .*toy_envs.py:\d+ in step 3 .*twice in a row"
    ):
        steps(envs, 20)
    assert "(without text: its __str__ raised AttributeError)" in caplog.text


@pytest.mark.parametrize(
    ("num_envs", "plan"),
    [
        (1, [1, 7]),  # an episode of five steps in between
        (1, [2, 5, 7, 10]),  # steps 2, 3, 2, 3
        (1, [8, 11]),  # step 3 of two episodes, after an episode that got further
        (2, [1, 2]),  # of two environments in one step, as of a server that both use
        (2, [3, 6]),  # of two environments, with a step in between
        (2, [11, 12]),  # of two environments, after episodes that got further
    ],
)
def test_errors_after_progress_or_elsewhere_are_replaced(make, num_envs: int, plan: list[int], tmp_path: Path) -> None:
    envs = make("toy_envs:Planned-v0", num_envs, 0, {"plan": plan, "tag": str(tmp_path)}, restarts=10)
    envs.reset(range(num_envs))
    assert sum(result.failures for result in steps(envs, 20)) == len(plan)


def test_a_first_observation_that_is_not_finite_costs_a_restart(make, tmp_path, caplog) -> None:
    tasks = {"tasks": ({}, {}), "task_names": ("reach", "push")}
    description = EnvDescription("toy_envs:Planned-v0", {"lost": [2, 6], "tag": str(tmp_path)}, **tasks)
    envs = make(description, 2, 0, restarts=2)
    assert envs.reset([0, 1]).tolist() == [[1, 0], [1, 0]]
    results = steps(envs, 12)
    assert sum(result.failures for result in results) == 2
    assert not any(result.invalid.any() for result in results), "the episode before it was over"
    assert all(np.isfinite(result.observations).all() for result in results)
    name = r"environment 1 \(toy_envs:Planned-v0, task push\)"
    assert re.search(
        rf"{name} is started again, restarts left: 1: NotFinite in reset: .* -inf at \[0, 1\]", caplog.text
    )


@pytest.mark.parametrize(
    ("lost", "restarts", "reason"), [([4], 0, "no restart is left of 0"), ([4, 5], 9, "twice in a row: no further")]
)
def test_first_observations_that_stay_not_finite_end_it(make, lost, restarts: int, reason: str, tmp_path: Path) -> None:
    envs = make("toy_envs:Planned-v0", 2, 0, {"lost": lost, "tag": str(tmp_path)}, restarts=restarts)
    envs.reset([0, 1])
    with pytest.raises(
        WorkerError, match=r"environment 1 .* failed in reset:\nthe first observation has .* at"
    ) as found:
        steps(envs, 5)
    assert f"environment 1 (toy_envs:Planned-v0): NotFinite in reset{': ' if restarts == 0 else ', '}{reason}" in str(
        found.value
    )
    assert "Traceback" not in str(found.value)


def test_the_same_failure_of_another_environment_is_told_briefly(started, caplog, tmp_path: Path) -> None:
    envs = started("toy_envs:Planned-v0", 3, 0, {"plan": [1, 2, 6], "tag": str(tmp_path)}, restarts=9)
    steps(envs, 2)
    first, second, third = caplog.messages
    assert first.endswith("in step 1 of an episode: bug in call 1")
    assert second == "environment 1 (toy_envs:Planned-v0) is started again, restarts left: 7: as above"
    assert third.endswith("in step 2 of an episode: bug in call 6")


def test_the_last_failure_says_that_no_restart_is_left(make, tmp_path: Path) -> None:
    envs = make("toy_envs:Planned-v0", 1, 0, {"plan": [2, 5, 7], "tag": str(tmp_path)}, restarts=2)
    envs.reset([0])
    with pytest.raises(WorkerError, match=r"in step 2 of an episode: no restart is left of 2 \(env.restarts\)"):
        steps(envs, 20)


@pytest.mark.parametrize(("fault", "error"), [("raise", WorkerError), ("hang", Deadline), ("die", WorkerDied)])
def test_one_failure_too_many_ends_it_with_the_name(started, fault: str, error: type[Exception]) -> None:
    """The same seed has the same fault again: environments start over with the first one's seed."""
    envs = started(
        TOY, 2, 2, {"fault": fault, "which": 1, "at": 1}, restarts=1, step_timeout_s=2.0 if fault == "hang" else HANG_S
    )
    first = steps(envs, 1)
    assert first[0].failures == 1
    pids = envs.worker_pids
    envs.reset([0, 1])
    with pytest.raises(error, match=r"environment 1"):
        steps(envs, 1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_state_can_be_saved_while_a_replacement_starts(started) -> None:
    envs = started(TOY, 2, 2, {"fault": "die", "which": 1}, restarts=1)
    steps(envs, 3)
    state = envs.state_dict()
    other = started(TOY, 2, 0, {})
    assert other.load_state_dict(state).tolist() == [[1, 3], [1, 0]]
    expected = steps(envs, 2)
    assert expected[0].invalid.tolist() == [False, True], "nobody saw that observation yet"
    assert expected[1].observations.tolist() == [[2, 0], [1, 1]]
    assert_equal_rows(steps(other, 2), expected, [0, 1])


def test_a_resumed_run_acts_on_no_observation_of_an_episode_that_was_lost_before_the_save(started) -> None:
    envs = started(TOY, 4, 2, {}, restarts=3)
    steps(envs, 2)
    killed(envs, 1)
    state = envs.state_dict()
    assert state["unseen"] == [2, 3]
    expected = steps(envs, 6)
    for workers in (0, 2, 4):
        resumed = started(TOY, 4, workers, {})
        resumed.load_state_dict(state)
        assert resumed.state_dict()["unseen"] == [2, 3], "a state of a state"
        results = steps(resumed, 6)
        assert_equal_rows(results, expected, [0, 1, 2, 3])
        assert resumed.state_dict()["unseen"] == []
        assert [[(one.env_index, one.length) for one in result.episodes] for result in results] == [
            [(one.env_index, one.length) for one in result.episodes] for result in expected
        ]
    chosen = started(TOY, 2, 0, {})
    chosen.load_state_dict(state, [1, 2])
    assert steps(chosen, 1)[0].invalid.tolist() == [False, True]


def test_a_replacement_that_is_idle_waits_for_the_next_choice(started) -> None:
    envs = started(TOY, 2, 2, {"fault": "die", "which": 1}, restarts=1)
    steps(envs, 3)
    envs.send(np.zeros((2, 2), np.float32), idle=np.array([False, True]))
    result = envs.receive()
    assert result.invalid.tolist() == result.truncated.tolist() == [False, False]
    assert result.observations.tolist() == [[1, 4], [1, 0]]
    assert steps(envs, 1)[0].observations.tolist() == [[2, 0], [1, 1]]
