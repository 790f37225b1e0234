"""The sandbox of programs: attacks fail, honest programs pass, and without isolation nothing starts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_platform.records
from rl_platform.envs.reasoning.sandbox import isolation, process, program_runner, spec
from rl_platform.envs.reasoning.sandbox.cases import Case, cases_of
from rl_platform.envs.reasoning.sandbox.process import Limits, Result, Sandbox
from rl_platform.envs.reasoning.sandbox.program_verdict import judge, passes, program_of, same
from rl_platform.envs.reasoning.sandbox.spec import CodeSpec
from rl_platform.envs.reasoning.score import OUTCOMES, Score
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError

HERE = Path(__file__).parent
ATTACKS: dict[str, dict[str, str]] = yaml.safe_load((HERE / "attacks.yaml").read_text(encoding="utf-8"))
HONEST: list[list[Any]] = yaml.safe_load((HERE / "honest.yaml").read_text(encoding="utf-8"))
LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * 2**20)
PRELUDE = """
import ctypes, json, os, re, struct, sys, time
def win(): os.write(1, b"ESCAPED"); os.write(2, b"ESCAPED"); os._exit(0)
def attempt(function, *arguments):
    try: function(*arguments)
    except BaseException: return
    win()
def raw(name, *arguments):
    number = NUMBERS[name]
    if number >= 0 and ctypes.CDLL(None).syscall(number, *arguments) >= 0: win()
def seek(text):
    if found := re.search("ANSWER-[0-9a-f]{16}", text): print(found[0]); win()
"""
needs_layers = pytest.mark.skipif(bool(isolation.missing_layers()), reason="; ".join(isolation.missing_layers()))


class Outside:
    """What attacks would reach: a file, a server, an abstract socket, a variable and an inheritable descriptor."""

    def __init__(self, folder: Path) -> None:
        self.answer = f"ANSWER-{secrets.token_hex(8)}"
        self.canary = folder / "canary"
        self.canary.write_text(self.answer)
        self.descriptor = os.open(self.canary, os.O_RDWR)
        os.set_inheritable(self.descriptor, True)
        self.servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.name = f"s{secrets.token_hex(8)}"
        self.servers[1].bind(f"\0{self.name}")
        self.servers[1].listen()
        os.environ["SECRET"] = self.answer

    def program(self, attack: str) -> str:
        import ctypes
        import re

        names = re.findall(r'raw\("(\w+)"', attack)
        resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
        numbers = {name: resolve(name.encode()) for name in names}
        places = {
            "CANARY": str(self.canary),
            "PID": str(os.getpid()),
            "PORT": str(self.servers[0].getsockname()[1]),
            "SOCKET": self.name,
            "PACKAGE": str(Path(rl_platform.records.__file__).parent),
        }
        for word, value in places.items():
            attack = re.sub(rf"\b(?<!_){word}\b|(?<=\\0){word}", value, attack)
        return f"NUMBERS = {numbers}\n{PRELUDE}\n{attack}"

    def untouched(self) -> bool:
        for server in self.servers:
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
        return self.canary.read_text() == self.answer

    def close(self) -> None:
        del os.environ["SECRET"]
        os.close(self.descriptor)
        for server in self.servers:
            server.close()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    world = Outside(tmp_path)
    yield world
    world.close()


def run(program: str, *cases: Case, limits: Limits = LIMITS, isolated: bool = True) -> list[Result]:
    with Sandbox(program, limits, isolated=isolated) as sandbox:
        return [sandbox.run(case) for case in cases]


@needs_layers
def test_no_attack_succeeds(outside: Outside) -> None:
    attacks = [(f"{kind}: {name}", text) for kind, part in ATTACKS.items() for name, text in part.items()]
    assert len(attacks) >= 90

    def tried(attack: tuple[str, str]) -> tuple[str, Result, bool]:
        name, text = attack
        called = name.startswith("calls:")
        case = Case(outside.answer, entry_point="solve", arguments=[]) if called else Case(outside.answer, input="1\n")
        [result] = run(outside.program(text), case)
        return name, result, passes(case, result) or b"ESCAPED" in result.output or "ESCAPED" in result.note

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(tried, attacks))
    assert [(name, result) for name, result, succeeded in results if succeeded] == []
    assert outside.untouched()
    broken = ("SyntaxError", "NameError", "IndentationError", "AttributeError")
    spoilt = [(name, result.note) for name, result, _ in results if result.note.rpartition("\n")[2].startswith(broken)]
    assert [each for each in spoilt if not each[0].endswith("import hook")] == []  # it removed the modules it needs


@needs_layers
def test_honest_programs_pass() -> None:
    assert len(HONEST) >= 50

    def case_of(row: list[Any]) -> Case:
        if len(row) == 3:
            return Case(row[2], input=row[1])
        return Case(row[3], entry_point=row[1], arguments=row[2])

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda row: run(row[0], case_of(row), limits=Limits(5.0, 512 * 2**20))[0], HONEST))
    failed = [(row, result) for row, result in zip(HONEST, results, strict=True) if not passes(case_of(row), result)]
    assert failed == []


@needs_layers
def test_attacks_that_the_filter_of_system_calls_would_stop_fail_without_it(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_all = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
    monkeypatch.setattr(process, "system_call_filter", lambda: allow_all)
    attacks = {
        "network": ("loopback", "abstract socket"),
        "files": ("password file", "file of the user", "open by handle", "mount", "device", "patched library"),
        "environment": ("memory of the parent",),
        "signals": ("the parent", "process 1"),
        "kernel": ("root", "bpf"),
    }
    for kind, names in attacks.items():
        for name in names:
            [result] = run(outside.program(ATTACKS[kind][name]), Case(outside.answer))
            assert b"ESCAPED" not in result.output, name
    assert outside.untouched()


@needs_layers
def test_nothing_outlives_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "system_call_filter", lambda: struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
    orphans = (
        "import os, time\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(60)\n os._exit(0)\n"
        "os.wait(); print('started')"
    )
    before = namespaces()
    with Sandbox(orphans, LIMITS, isolated=True) as sandbox:
        assert sandbox.run(Case("")).output == b"started\n"
        [mine] = namespaces() - before
        assert mine
    assert namespaces() <= before


@needs_layers
def test_a_sandbox_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(process, "SPARE_S", 0.1)
    monkeypatch.setattr(program_runner, "CONFINED_S", 0.1)
    before = namespaces()
    with Sandbox("print(1)", Limits(0.1, LIMITS.memory_bytes), isolated=True) as sandbox:
        children = psutil.Process(sandbox._process.pid).children(recursive=True)
        for child in children:
            child.suspend()
        assert sandbox.run(Case("1")).status == "timeout"
    assert namespaces() <= before
    assert psutil.wait_procs(children, 5)[1] == [], "they were no longer descendants of this process"


def test_the_time_of_a_program_begins_when_it_is_confined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a busy machine that may take longer than the program may."""
    monkeypatch.setattr(program_runner, "confine", lambda *_: time.sleep(1.5))
    setup = {"program": "import os\nos.write(1, b'1')\nos._exit(0)", "isolated": False, "longest_output": 100}
    status, _, output, note = program_runner.run(setup, {"wall_s": 1.0, "cpu_s": 1}, str(tmp_path))
    assert (status, output) == (program_runner.DONE, b"1"), note


@needs_layers
def test_attacks_succeed_without_isolation(outside: Outside) -> None:
    """Otherwise the attacks above would prove nothing."""
    attacks = {
        "processes": ("posix.system", "double fork"),
        "network": ("loopback", "abstract socket", "listening"),
        "files": ("password file", "file of the user", "symbolic link", "relative path", "the platform"),
        "environment": ("memory of the parent", "process information", "host name"),
    }
    for kind, names in attacks.items():
        for name in names:
            [result] = run(outside.program(ATTACKS[kind][name]), Case(outside.answer), isolated=False)
            assert b"ESCAPED" in result.output, (name, result)


def namespaces() -> set[str]:
    """Of the processes that descend from this one."""
    import psutil

    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            found.add(os.readlink(f"/proc/{child.pid}/ns/pid"))
        except OSError:
            continue
    return found - {os.readlink("/proc/self/ns/pid")}


@needs_layers
def test_a_sample_does_not_change_later_ones(tmp_path: Path) -> None:
    poison = (
        "import builtins, json, os, sys\nfor name in ('json', 'sitecustomize', 'math'):\n"
        "    for folder in ('.', '..', '/tmp'):\n        try: open(f'{folder}/{name}.py', 'w').write('1 / 0')\n"
        "        except OSError: pass\nbuiltins.print = None; sys.stdout.write('x')"
    )
    spec = CodeSpec(LIMITS, isolated=True, partial=False)
    verify = spec.load()
    assert verify(item(poison, "x")) == Score(1.0, reason="passed", detail="passed 1 of 1 tests")
    assert verify(item("import json, math, os; print(os.listdir('.'))", "[]")).value == 1.0
    # nor do the tests of one sample: each has a fresh process and folder
    counting = "import os, sys; sys.modules['count'] = 1; print(os.listdir('.')); open('x', 'w')"
    assert [each.output for each in run(counting, *[Case("")] * 3)] == [b"[]\n"] * 3


def item(program: str, *outputs: str) -> ScoreItem:
    return ScoreItem(program, "", "", {"tests": [{"input": "", "output": output} for output in outputs]})


@needs_layers
def test_time_memory_and_output_are_limited_and_named() -> None:
    began = time.monotonic()
    programs = {
        "while True: pass": "timeout",
        "import time; time.sleep(60)": "timeout",
        "bytearray(2**40)": "memory",
        "while True: print('x' * 1000)": "output",
        "1 / 0": "crashed",
        "import os; os.abort()": "crashed",
        "print(1)": "ended",
    }
    with ThreadPoolExecutor(4) as pool:
        ended = pool.map(lambda program: run(program, Case("1"))[0].status, programs)
    assert dict(zip(programs, ended, strict=True)) == programs
    assert time.monotonic() - began < 60
    first, second = run("import time; time.sleep(60)", Case(""), Case(""))
    assert (first.status, second.status) == ("timeout", "timeout")


@needs_layers
def test_a_pool_scores_programs_and_says_why() -> None:
    with closing(ScoringPool(CodeSpec(LIMITS, isolated=True, partial=True), num_workers=1, timeout_s=60.0)) as pool:
        good, half, none, crash = pool.score(
            [
                item("Sure:\n```python\nprint(1)\n```", "1"),
                item("```\nprint(1)\n```", "1", "2"),
                item("```python\n\n```", "1"),
                item("print(", "1"),
            ]
        )
    assert good == Score(1.0, reason="passed", detail="passed 1 of 1 tests")
    assert half == Score(0.5, reason="wrong", detail=r"test 2 of 2: wrong: '1\n' instead of '2'")
    assert none == Score(0.0, reason="no_program", detail="the response holds no program")
    assert crash.detail == "test 1 of 1: crashed: SyntaxError: '(' was never closed"
    assert {score.reason for score in (good, half, none, crash)} <= set(OUTCOMES)


def test_without_isolation_programs_still_run_and_have_limits() -> None:
    program = "import os; print(sorted(os.environ))"
    [result] = run(program, Case(""), isolated=False)
    assert result.output == b"['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED']\n"
    assert run("1 / 0", Case(""), isolated=False)[0].status == "crashed"
    assert run("while True: pass", Case(""), isolated=False)[0].status == "timeout"


@pytest.mark.parametrize("lacking", ["bubblewrap", "landlock", "seccomp", "namespaces"])
def test_it_does_not_start_without_a_layer(lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = {
        "bubblewrap": ["namespaces: bubblewrap is not installed (apt install bubblewrap)"],
        "landlock": ["Landlock: this kernel has none"],
        "seccomp": ["seccomp: libseccomp cannot make the filter"],
        "namespaces": [],
    }[lacking]
    monkeypatch.setattr(spec, "missing_layers", lambda: missing)
    if lacking == "namespaces":
        refusing = tmp_path / "bwrap"
        refusing.write_text("#!/bin/sh\necho bwrap: setting up uid map: Permission denied >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setattr(isolation, "bubblewrap", lambda: str(refusing))
        monkeypatch.setattr(process, "system_call_filter", lambda: b"")
    with pytest.raises(ConfigError) as raised:
        CodeSpec(LIMITS, isolated=True, partial=False).load()
    [problem] = raised.value.problems
    assert problem.key == "reward.isolation"
    said = {"landlock": "Landlock", "namespaces": "setting up uid map: Permission denied"}.get(lacking, lacking)
    assert said in problem.message
    assert "reward.code.url" in problem.hint
    assert CodeSpec(LIMITS, isolated=False, partial=False).load() is not None


@needs_layers
def test_a_program_that_cannot_be_confined_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "system_call_filter", lambda: bytes(8))  # no valid filter
    with (
        Sandbox("print(1)", LIMITS, isolated=True) as sandbox,
        pytest.raises(Exception, match=r"(?s)could not confine the program: .*seccomp"),
    ):
        sandbox.run(Case("1"))


def test_layers_that_this_machine_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "bubblewrap", lambda: None)
    assert any("apt install bubblewrap" in each for each in isolation.missing_layers())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert isolation.missing_layers() == ["namespaces, Landlock and seccomp: they belong to Linux, and this is darwin"]


# The verdict, without a sandbox ---------------------------------------------------------------------------------------


def test_the_program_is_the_last_block_or_the_whole_response() -> None:
    assert program_of("print(1)") == "print(1)"
    assert program_of("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert program_of("```\na\n```") == "a\n"
    assert program_of("cut:\n```python\na\nb") == "a\nb"


def test_all_tests_or_the_fraction_that_passes() -> None:
    cases = [Case("1"), Case("2"), Case("3")]
    asked: list[Case] = []

    def echo(case: Case) -> Result:
        asked.append(case)
        return Result("timeout") if case.expected == "3" else Result("ended", b"1\n")

    assert judge("x", cases, echo, partial=False).value == 0.0
    assert len(asked) == 2  # it stops at the first failure
    partial = judge("x", cases, echo, partial=True)
    assert (partial.value, partial.reason) == (1 / 3, "wrong")
    assert judge("x", cases[:1], echo, partial=False) == Score(1.0, reason="passed", detail="passed 1 of 1 tests")
    assert judge(" \n", cases, echo, partial=True).reason == "no_program"


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (True, 1, False),
        (1, True, False),
        (float("nan"), 1, False),
        (10**400, 1.5, False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (None, None, True),
        (None, False, False),
        ("", None, False),
    ],
)
def test_equality_of_results(value: object, expected: object, equal: bool) -> None:
    assert same(value, expected) is equal


def test_output_may_differ_in_white_space_at_ends_only() -> None:
    assert passes(Case("1 2\n3"), Result("ended", b"1 2 \r\n3\n\n"))
    assert not passes(Case("1 2"), Result("ended", b"1  2"))
    assert not passes(Case("1"), Result("crashed", b"1"))
    assert not passes(Case("1", entry_point="f"), Result("ended", b"\xff"))
    assert not passes(Case("1", entry_point="f"), Result("ended", b"[" * 10**5))


# Columns of a row -----------------------------------------------------------------------------------------------------


def test_tests_of_a_row() -> None:
    printed = {"tests": [{"input": "1", "output": "2"}]}
    assert cases_of(printed) == [Case("2", input="1")]
    assert cases_of({"tests": '[{"input": "1", "output": "2"}]'}) == [Case("2", input="1")]
    called = {"tests": [{"arguments": [1], "result": None}], "entry_point": "f"}
    assert cases_of(called) == [Case(None, entry_point="f", arguments=[1])]
    assert "expected" not in cases_of(printed)[0].question()


def test_the_shipped_tasks_are_those_of_their_script(script) -> None:
    programs = script(Path(__file__).parents[3] / "benchmarks" / "programs.py")
    for name, rows in programs.FILES.items():
        assert [json.loads(line) for line in (programs.FOLDER / name).read_text().splitlines()] == rows()
        assert all(cases_of(row) for row in rows())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "column 'tests' must be a list of tests"),
        ({"tests": []}, "column 'tests' must be a list of tests"),
        ({"tests": "{"}, "column 'tests' is a text that is not JSON"),
        ({"tests": ["x"]}, "test 1: must have the fields input and output (without a column 'entry_point')"),
        ({"tests": [{"input": "1", "output": "2"}, {"input": "1"}]}, "test 2: must have the fields input and output"),
        ({"tests": [{"input": 1, "output": "2"}]}, "test 1: input must be a text, not 1"),
        ({"tests": [{"input": "1", "output": "2"}], "entry_point": "f"}, "fields arguments and result (with the entry"),
        ({"tests": [{"arguments": 1, "result": 2}], "entry_point": "f"}, "arguments must be a list, or an object"),
        (
            {"tests": [{"arguments": [], "result": 2}], "entry_point": "f()"},
            "column 'entry_point' must name a function",
        ),
        ({"tests": [{"arguments": [], "result": 2}], "entry_point": 3}, "column 'entry_point' must name a function"),
    ],
)
def test_malformed_tests(row: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="column") as raised:
        cases_of(row)
    assert message in str(raised.value)
