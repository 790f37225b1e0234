"""Rewards that hang, crash or raise, really injected: they cost their own samples and nothing else."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from reward_parts import SHORT_S, HungRewards
from waiting import HANG_S, alive, until

from rl_platform.components.reward import LanguageReward
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.reward import Reward as RewardConfig
from rl_platform.config.schema.runner import Runner
from rl_platform.envs.reasoning.score import DIED, RAISED, REFUSED, TIMEOUT
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec
from rl_platform.errors import ConfigError, Unreachable, WorkerDied, WorkerError
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import check_any_scored
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentContext

# What a response asks for is done to the process that scores it; `folder` gets the process ids of those who hang.
REWARD = """
import ctypes, os, pathlib, re, subprocess, sys, time
from rl_platform.envs.reasoning import score, scoring_worker

def patch():
    scoring_worker.score_one = lambda verifier, item: score.Score(float("nan"))

RETURNED = {
    "too large": 1e9, "largest": -1e6, "true": True, "integer": 7, "Score(nan)": score.Score(float("nan"))
}

def reward(response, answer, metadata):
    if response in ("hang", "hang in C"):
        pathlib.Path(answer, str(os.getpid())).touch()
    if response == "hang":
        time.sleep(600)
    if response == "hang in C":
        re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter lock for ever
    if response == "hang with child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(answer, str(child.pid)).touch()
        pathlib.Path(answer, str(os.getpid())).touch()
        time.sleep(600)
    if response == "crash":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "exit":
        sys.exit(0)
    if response == "raise":
        raise KeyError("my own mistake")
    if response == "nan":
        return float("nan")
    if response == "text":
        return "1.0"
    if response == "patch":  # the process no longer checks what it sends
        patch()
    if response in RETURNED:
        return RETURNED[response]
    if response.startswith("send "):
        os.write(int(sys.argv[1]), response.removeprefix("send ").encode() + b"\\n")
        time.sleep(0.2)
    if response == "endless":
        os.write(int(sys.argv[1]), b"x" * (2 * score.LONGEST_MESSAGE))
    if response == "half":
        os.write(int(sys.argv[1]), b'{"value": 1.0')
        pathlib.Path(answer, str(os.getpid())).touch()
        time.sleep(600)
    if response == "slow":
        time.sleep(0.1)
    return float(len(response)) / 10
"""
SPEC = VerifierSpec("faulty_reward:reward")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where hanging processes leave their ids; the user's module lies beside it."""
    (tmp_path / "faulty_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hung").mkdir()
    return tmp_path / "hung"


@pytest.fixture
def make_pool(closes):
    def make(spec: VerifierSpec = SPEC, num_workers: int = 2, timeout_s: float = HANG_S) -> ScoringPool:
        return closes(ScoringPool(spec, num_workers=num_workers, timeout_s=timeout_s))

    return make


@pytest.fixture
def hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HungRewards:
    """Responses that hang run out of time, and no others."""
    return HungRewards(lambda pid: (folder / str(pid)).exists(), monkeypatch)


def items(folder: Path, *responses: str) -> list[ScoreItem]:
    return [ScoreItem(response, "question", str(folder)) for response in responses]


def hung(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.mark.parametrize("kind", ["hang", "hang in C"])
def test_eight_hangs_on_four_workers_do_not_hold_up_the_good_ones(
    folder: Path, make_pool, hangs: HungRewards, kind: str
) -> None:
    """After half of the timeout substitutes take the next four, and the good ones after the timeout of the first."""
    hangs.waits = True
    pool = make_pool(num_workers=4, timeout_s=SHORT_S)
    futures = pool.submit(items(folder, *[kind] * 8, *["good"] * 24))
    until(lambda: len(hung(folder)) == 4)
    hangs.halfway.update(hung(folder))
    until(lambda: len(hung(folder)) == 8)
    assert not any(future.done() for future in futures)
    hangs.over.update(hangs.halfway)
    hangs.halfway.update(hung(folder))
    good = [future.result(HANG_S) for future in futures[8:]]
    first = [future.result(HANG_S) for future in futures[:4]]
    assert not any(future.done() for future in futures[4:8]), "the good ones do not wait for them"
    hangs.over.update(hung(folder))
    bad = [*first, *(future.result(HANG_S) for future in futures[4:8])]
    assert [(score.value, score.valid) for score in good] == [(0.4, True)] * 24
    assert [(score.valid, score.reason) for score in bad] == [(False, TIMEOUT)] * 8
    assert len(hung(folder)) == 8
    assert not alive(hung(folder))
    until(lambda: len(pool.process_ids) == 4)


def test_a_hang_ends_at_the_timeout(folder: Path, make_pool) -> None:
    pool, start = make_pool(num_workers=1, timeout_s=0.5), time.monotonic()
    (score,) = pool.score(items(folder, "hang"))
    assert (score.valid, score.reason, score.detail) == (False, TIMEOUT, "no answer within 0.5 s")
    assert time.monotonic() - start >= 0.5


def test_hang_behind_quick_ones_of_the_same_chunk(folder: Path, make_pool, hangs: HungRewards) -> None:
    pool = make_pool(num_workers=1, timeout_s=SHORT_S)
    pool.score(items(folder, *["good"] * 100))  # chunks are large by now
    scores = pool.score(items(folder, "a", "hang", "bb", "hang", "ccc"))
    assert len(hung(folder)) == 2, "the fault was not injected"
    assert [(score.value, score.valid) for score in scores[::2]] == [(0.1, True), (0.2, True), (0.3, True)]
    assert [(score.value, score.valid) for score in scores[1::2]] == [(0.0, False)] * 2


def test_what_a_hanging_reward_started_dies_with_it(folder: Path, make_pool, hangs: HungRewards) -> None:
    pool = make_pool(num_workers=1, timeout_s=SHORT_S)
    (score,) = pool.score(items(folder, "hang with child"))
    assert score.reason == TIMEOUT
    assert len(hung(folder)) == 2, "the fault was not injected"
    until(lambda: not alive(hung(folder)))


def test_slow_but_within_the_timeout_is_scored(folder: Path, make_pool) -> None:
    scores = make_pool(num_workers=2).score(items(folder, *["slow"] * 4))
    assert all(score.valid for score in scores)


FAULTS = {  # response -> reason and detail of its score
    "raise": (RAISED, "KeyError: 'my own mistake'"),
    "exit": (RAISED, "SystemExit"),
    "nan": (RAISED, "a reward must be a finite number, not nan"),
    "text": (RAISED, "a reward must be a finite number, not '1.0'"),
    "too large": (RAISED, "a reward must be at most 1e+06 in size, not 1000000000.0"),
    "crash": (DIED, "died"),
    "segfault": (DIED, "died"),
}


def test_a_fault_costs_its_own_sample_only(folder: Path, make_pool) -> None:
    pool = make_pool()
    scores = pool.score(items(folder, *(response for fault in FAULTS for response in ("a", fault, "a"))))
    assert [(score.value, score.valid) for score in scores[::3] + scores[2::3]] == [(0.1, True)] * 14
    for bad, (reason, detail) in zip(scores[1::3], FAULTS.values(), strict=True):
        assert (bad.value, bad.valid, bad.reason) == (0.0, False, reason)
        assert detail in bad.detail


def sent(value: str = "0.5", steps: str = "[]", text: str = "null", valid: str = "true") -> str:
    """A response whose verifier writes this score to the socket itself, past the checks of its process."""
    reason = '""' if valid == "true" else '"timeout"'
    line = f'"value": {value}, "valid": {valid}, "reason": {reason}, "detail": "", "steps": {steps}, "text": {text}'
    return f"send {{{line}}}"


LIES = {
    "nan": sent("NaN"),
    "infinity": sent("-Infinity"),
    "a billion": sent("1e9"),
    "the largest float": sent("1e308"),
    "just above the range": sent("1000000.1"),
    "a whole number that no float holds": sent("1" + "0" * 400),
    "a whole number of too many digits": sent("1" * 5_000),
    "a bool": sent("true"),
    "a text": sent('"1.0"'),
    "a list": sent("[1.0]"),
    "nothing": sent("null"),
    "a step that is nan": sent(steps="[[1, NaN]]"),
    "a step out of range": sent(steps="[[1, -1e7]]"),
    "steps out of range together": sent(steps="[[1, 9e5], [2, -9e5]]"),
    "a step behind the response": sent(steps="[[100000, 0.1]]"),
    "a step at a bool": sent(steps="[[true, 0.1]]"),
    "a step of three": sent(steps="[[1, 0.1, 0.1]]"),
    "steps that are no list": sent(steps='{"1": 0.1}'),
    "a text of a tool that is none": sent(text="5"),
    "half of a surrogate pair": sent(text='"\\ud800"'),
    "another reason": sent("0.0", valid="false"),
    "no score": "send {}",
    "no object": "send 1.0",
    "no JSON": "send hello",
    "deep": "send " + "[" * 100_000,
    "a pickle": "send cos\nsystem\n(S'touch stolen'\ntR.",
}


def test_what_is_no_score_is_refused(folder: Path, make_pool, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    pool = make_pool()
    scores = pool.score(items(folder, *(response for lie in LIES.values() for response in ("a", lie))))
    assert [(score.value, score.valid, score.steps) for score in scores[::2]] == [(0.1, True, ())] * len(LIES)
    for name, bad in zip(LIES, scores[1::2], strict=True):
        assert (name, bad.value, bad.valid, bad.reason) == (name, 0.0, False, REFUSED)
        assert "sent something else than a score" in bad.detail
    assert not (folder / "stolen").exists()


def test_a_process_that_sends_without_end_is_refused(folder: Path, make_pool) -> None:
    pool = make_pool(num_workers=1)
    bad, good = pool.score(items(folder, "endless", "a"))
    assert (bad.valid, bad.reason) == (False, REFUSED)
    assert (good.value, good.valid) == (0.1, True)


def test_a_process_that_withholds_half_of_a_score_times_out_alone(folder: Path, make_pool, hangs: HungRewards) -> None:
    hangs.waits = True
    pool = make_pool(num_workers=2, timeout_s=SHORT_S)
    bad, *good = pool.submit(items(folder, "half", *["a"] * 20))
    assert all(future.result(HANG_S).valid for future in good)
    assert not bad.done()
    hangs.waits = False
    assert bad.result(HANG_S).reason == TIMEOUT


def test_a_patched_process_does_not_change_later_samples(folder: Path, make_pool) -> None:
    pool = make_pool(num_workers=1)
    scores = pool.score(items(folder, "patch", *["a"] * 20))
    assert [(score.value, score.valid) for score in scores] == [(0.5, True), *[(0.1, True)] * 20]


def test_a_verifier_cannot_return_an_unchecked_score(folder: Path, make_pool) -> None:
    """A tool returns a Score, so a verifier can do so too."""
    (score,) = make_pool().score(items(folder, "Score(nan)"))
    assert (score.valid, score.reason) == (False, REFUSED)


def test_rewards_within_the_range_are_kept(folder: Path, make_pool) -> None:
    scores = make_pool().score(items(folder, "largest", "true", "integer"))
    assert [(score.value, score.valid) for score in scores] == [(-1e6, True), (1.0, True), (7.0, True)]


def test_killed_idle_processes_are_replaced(folder: Path, make_pool) -> None:
    pool = make_pool()
    before = pool.process_ids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert all(score.valid for score in pool.score(items(folder, *["a"] * 10)))
    until(lambda: len(pool.process_ids) == 2 and not set(before) & set(pool.process_ids))


def test_scores_keep_the_order_of_their_callers(folder: Path, make_pool) -> None:
    pool = make_pool()
    results: dict[int, list[float]] = {}

    def call(length: int) -> None:
        results[length] = [s.value for s in pool.score(items(folder, *["x" * length, "y" * (length + 1)] * 50))]

    threads = [threading.Thread(target=call, args=(length,)) for length in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {length: [length / 10, (length + 1) / 10] * 50 for length in range(1, 5)}


def test_close_leaves_no_process_and_fails_what_waits(folder: Path, make_pool) -> None:
    gc.collect()  # or what other tests left may be closed meanwhile
    descriptors = psutil.Process().num_fds()
    pool = make_pool(num_workers=2, timeout_s=60.0)
    pids = pool.process_ids
    futures = pool.submit(items(folder, "hang", "hang", "good"))
    until(lambda: len(hung(folder)) == 2)
    pool.close()
    pool.close()
    assert not alive(pids)
    for future in futures:
        with pytest.raises(WorkerDied, match="closed before this response was scored"):
            future.result(timeout=1)
    with pytest.raises(WorkerDied, match="closed"):
        pool.score(items(folder, "good"))
    assert psutil.Process().num_fds() == descriptors


def test_processes_die_with_a_killed_parent(folder: Path) -> None:
    code = f"""
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec
pool = ScoringPool(VerifierSpec("faulty_reward:reward"), num_workers=3, timeout_s=60.0)
futures = pool.submit([ScoreItem("hang", "", {str(folder)!r}), ScoreItem("hang in C", "", {str(folder)!r})])
print(*pool.process_ids, flush=True)
futures[0].result()
"""
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    until(lambda: len(hung(folder)) == 2)
    assert len(alive(pids)) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(pids))


@pytest.mark.parametrize(
    ("spec", "error", "expected"),
    [
        (VerifierSpec("no_such_module:f"), ConfigError, "cannot be imported: ModuleNotFoundError"),
        (VerifierSpec("faulty_reward:none"), ConfigError, "cannot be imported: AttributeError"),
        (VerifierSpec("task", "reasoning_gym", "no_such_dataset"), WorkerError, "not registered"),
        (VerifierSpec("dying_reward:f"), WorkerDied, "3 scoring processes in a row did not start"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_fails_at_the_start(folder: Path, spec, error, expected: str) -> None:
    (folder.parent / "dying_reward.py").write_text("import os\nos._exit(1)\n")
    children = set(psutil.Process().children())
    with pytest.raises(error, match=expected):
        ScoringPool(spec, num_workers=2, timeout_s=HANG_S)
    assert set(psutil.Process().children()) <= children


# The component -------------------------------------------------------------------------------------------------------


@pytest.fixture
def reward(folder: Path, hangs: HungRewards):
    config = Config(
        runner=Runner(task_type="reasoning"),
        cluster=Cluster(component_placement={"reward": "all"}),
        reward=RewardConfig(type=SPEC.type, num_workers=2, timeout_s=SHORT_S),
    )
    component = LanguageReward(ComponentContext("reward", 0, 1, (), seed=1), config)
    yield component
    component.close()


def trajectories(folder: Path, *responses: str) -> list[Trajectory]:
    return [
        Trajectory(Prompt(n, "question", str(folder), (1,)), 0, (2,), (-0.1,), "stop", 3, text=response)
        for n, response in enumerate(responses)
    ]


def outcome(trajectory: Trajectory) -> tuple[int, float, float, bool]:
    return trajectory.prompt.index, trajectory.reward, trajectory.metric, trajectory.valid


EXPECTED = [(0, 0.1, 0.1, True), (1, 0.0, 0.0, False), (2, 0.0, 0.0, False), (3, 0.2, 0.2, True), (4, 0.0, 0.0, False)]
MIXED = ("a", "hang", "raise", "bb", "crash")


def test_component_scores_in_order_and_masks_faults(folder: Path, reward: LanguageReward) -> None:
    given = trajectories(folder, *MIXED)
    scored = reward.score(given)
    assert [outcome(trajectory) for trajectory in scored] == EXPECTED
    assert [trajectory.token_ids for trajectory in scored] == [trajectory.token_ids for trajectory in given]
    assert [trajectory.outcome for trajectory in scored] == ["", TIMEOUT, RAISED, "", DIED]
    assert reward.score([]) == []


def test_component_streams_what_is_ready(folder: Path, reward: LanguageReward, hangs: HungRewards) -> None:
    source, sink = Channel("rollouts", 64, HANG_S), Channel("scored", 64, HANG_S)
    hangs.waits = True
    returned: list[int] = []
    thread = threading.Thread(target=lambda: returned.append(reward.stream(source, sink)))
    thread.start()
    bad, *rest = [trajectories(folder, *MIXED)[n] for n in (1, 0, 2, 3, 4)]
    source.put(bad)
    source.put(rest[0])
    assert outcome(sink.get()) == EXPECTED[0]  # overtakes the one that hangs
    hangs.waits = False
    source.put_many(rest[1:])
    source.close()
    thread.join()
    assert returned == [5]
    assert not sink.closed
    assert sorted(outcome(trajectory) for trajectory in sink.get_many(64)) == EXPECTED[1:]


def test_a_step_without_any_score_ends_the_run_with_the_last_traceback(folder: Path, reward: LanguageReward) -> None:
    scored = reward.score(trajectories(folder, *MIXED))
    check_any_scored(scored, RewardConfig(type=SPEC.type))
    check_any_scored([], RewardConfig(type=SPEC.type))
    without = [each for each in scored if not each.valid]
    with pytest.raises(WorkerError, match=r"none of the 3 responses of a step \(died 1, raised 1, timeout 1\)"):
        check_any_scored(without, RewardConfig(type=SPEC.type))
    raised = reward.score(trajectories(folder, *["raise"] * 3))
    with pytest.raises(WorkerError, match=r"\(raised 3\)[^$]*KeyError: 'my own mistake'"):
        check_any_scored(raised, RewardConfig(type=SPEC.type))


@pytest.mark.parametrize(("second", "error"), [("timeout", Unreachable), ("raised", WorkerError)])
def test_a_step_of_silent_servers_can_be_tried_again(folder: Path, second: str, error: type) -> None:
    one, other = (replace(each, valid=False) for each in trajectories(folder, "a", "b"))
    section = RewardConfig(type="http", url="http://127.0.0.1:9/score")
    with pytest.raises(error, match=r"reward\.type http scored none of the 2 responses"):
        check_any_scored([replace(one, outcome="died"), replace(other, outcome=second)], section)


def test_stream_ends_with_the_error_of_its_channels(folder: Path, reward: LanguageReward) -> None:
    source, sink = Channel("rollouts", 64, HANG_S), Channel("scored", 64, HANG_S)
    source.put_many(trajectories(folder, "a", "bb"))
    source.close(WorkerDied("rollout[0] died"))
    with pytest.raises(WorkerDied, match="rollout"):
        reward.stream(source, sink)
    source, sink = Channel("rollouts", 64, HANG_S), Channel("scored", 64, HANG_S)
    source.put_many(trajectories(folder, "a", "bb"))
    source.close()
    sink.close(WorkerDied("actor[0] died"))
    with pytest.raises(Exception, match="actor"):
        reward.stream(source, sink)
