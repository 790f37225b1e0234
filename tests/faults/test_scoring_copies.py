"""Code that a sample runs in its copy of a scoring process: it changes no later sample, and its lies are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

import psutil
from reward_parts import SHORT_S, HungRewards
from waiting import HANG_S, alive, until

from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec

# Each attack runs in a copy; the outcome is its score or the error. Afterwards an honest sample scores 0.25.
ATTACKS = """
import json, os, sys, time
from rl_platform.envs.reasoning import scoring_worker, verifiers
from rl_platform.envs.reasoning.answers import fork

secret = os.open(os.devnull, os.O_RDONLY)

def patch():
    scoring_worker.score_one = verifiers.exact_match = fork.in_fork = honest.__globals__["float"] = lambda *_: 1.0
    return 0.5

def write(text):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text)
        except OSError:
            pass
    time.sleep(60)

def orphan():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(sys.argv[1], "w").write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
        time.sleep(0.01)
    return 0.5

def descriptors():
    try:
        os.fstat(secret)
    except OSError:
        return 0.5
    return 1.0

ATTACKS = {
    "patch": patch,
    "orphan": orphan,
    "descriptors": descriptors,
    "too large": lambda: 1e6,
    "negative": lambda: -1.0,
    "nan": lambda: float("nan"),
    "text": lambda: write(b"hello\\n"),
    "bool": lambda: write(b'{"value": true}\\n'),
    "pickle": lambda: write(b"cos\\nsystem\\n(S'true'\\ntR.\\n"),
    "deep": lambda: write(b"[" * 100_000),
    "two lines": lambda: write(b'{"value": 0.5}\\n{"value": 1.0}\\n'),
    "exit": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), 9),
    "raises": lambda: 1 / 0,
    "SystemExit": lambda: sys.exit(0),
    "memory": lambda: float(len(bytearray(2**40))),
}

def honest():
    return float("0.25")

fork.become_template()
outcomes = {}
for name, attack in ATTACKS.items():
    try:
        outcome = fork.in_fork(attack)
    except ValueError as error:
        outcome = str(error)
    outcomes[name] = (outcome, fork.in_fork(honest))
print(json.dumps(outcomes))
"""
REFUSED = {
    "too large": "wrote",
    "negative": "wrote",
    "nan": "wrote",
    "text": "without a result",
    "bool": "finite number",
    "pickle": "without a result",
    "deep": "without a result",
    "exit": "without a result",
    "killed": "without a result",
    "raises": "ZeroDivisionError",
    "SystemExit": "SystemExit",
    "memory": "MemoryError",
}


def test_a_copy_changes_nothing_but_its_own_score(tmp_path) -> None:
    left = tmp_path / "orphan"
    done = subprocess.run([sys.executable, "-c", ATTACKS, str(left)], capture_output=True, text=True, check=True)
    outcomes = json.loads(done.stdout)
    assert {name: later for name, (_, later) in outcomes.items()} == dict.fromkeys(outcomes, 0.25)
    for name in ("patch", "orphan", "descriptors", "two lines"):
        assert outcomes[name][0] == 0.5, name
    for name, part in REFUSED.items():
        assert part in str(outcomes[name][0]), (name, outcomes[name][0])
    until(lambda: not psutil.pid_exists(int(left.read_text())))


def test_answers_that_are_programs_score_zero_and_change_nothing(tmp_path) -> None:
    """The data set evaluates its answers."""
    stolen = tmp_path / "stolen"
    programs = [
        f"__import__('os').system('touch {stolen}')",
        "setattr(__import__('rl_platform').envs.reasoning.scoring_worker, 'score_one', 1)",
        "type('T', (str,), {'__eq__': lambda a, b: True})()",
        f"open('{stolen}', 'w')",
    ]
    with closing(
        ScoringPool(VerifierSpec("task", "reasoning_gym", "string_insertion"), num_workers=1, timeout_s=30.0)
    ) as pool:
        items = [ScoreItem(f"<answer>{text}</answer>", "", "ABC") for text in (*programs, "ABD", "ABC")]
        scores = pool.score(items)
    assert [(score.value, score.valid) for score in scores] == [(0.0, True)] * 5 + [(1.0, True)]
    assert not stolen.exists()


def test_a_copy_that_hangs_dies_with_its_process(monkeypatch) -> None:
    hangs = HungRewards(lambda pid: True, monkeypatch)
    hangs.waits = True
    with closing(
        ScoringPool(VerifierSpec("task", "reasoning_gym", "countdown"), num_workers=1, timeout_s=SHORT_S)
    ) as pool:
        (process,) = (psutil.Process(pid) for pid in pool.process_ids)
        (future,) = pool.submit([ScoreItem("<answer>9**9**9**9</answer>", "", "1 + 1", {"numbers": [1], "target": 2})])
        until(lambda: process.children())
        (copy,) = process.children()
        hangs.waits = False
        assert future.result(HANG_S).reason == "timeout"
        until(lambda: not alive([copy.pid]))
