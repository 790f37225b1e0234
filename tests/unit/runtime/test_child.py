"""Child processes: how they start, how they end, and that they die with a parent that is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, assert_gone, until

from rl_platform.runtime.child import Child, Death

SLEEP = "import time; time.sleep(600)"
ECHO = """
import os, sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
modules = [name for name in ("torch", "numpy") if name in sys.modules]
pipe.send((sys.argv[2:], os.environ["ADDED"], os.environ["PYTHONPATH"], os.getsid(0) == os.getpid(), modules))
pipe.recv()
"""
PARENT = """
import os, sys, time
from rl_platform.runtime.child import Child, Death
child = Child(sys.argv[2], Death[sys.argv[1]], scratch=sys.argv[3])
print(child.pid, flush=True)
time.sleep(600)
"""
BUSY = "import re\nre.match(r'(a+)+b', 'a' * 64)"  # holds the interpreter lock
FAMILY = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def test_a_child_has_its_arguments_a_clean_start_and_a_session_of_its_own() -> None:
    child = Child(ECHO, Death.HANG_UP, [7, "x y"], {"ADDED": "yes", "PYTHONPATH": "/first"})
    pipe = child.connection()
    arguments, added, path, leads, modules = pipe.recv()
    assert (arguments, added, leads, modules) == (["7", "x y"], "yes", True, [])
    assert path.split(os.pathsep)[0] == "/first"
    pipe.send(None)
    assert child.ends_within(HANG_S)
    assert child.exit_reason() == "exit code 0"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        (SLEEP, "closed its connection"),
    ],
)
def test_the_reason_of_an_end_is_text(code: str, reason: str) -> None:
    child = Child(code, Death.HANG_UP)
    assert child.exit_reason(HANG_S if code != SLEEP else 0.1) == reason
    child.kill()
    child.kill()
    assert child.ended
    assert not psutil.pid_exists(child.pid)


@pytest.mark.parametrize("death", Death)
def test_a_child_that_does_not_end_in_time_is_killed(death: Death) -> None:
    child = Child(SLEEP, death)
    began = time.monotonic()
    child.end(0.2)
    assert child.exit_reason() == "killed by SIGKILL"
    assert 0.2 <= time.monotonic() - began < HANG_S


def test_what_a_child_started_is_killed_with_it(tmp_path: Path) -> None:
    child = Child(FAMILY, Death.GUARD, scratch=str(tmp_path))
    started = until(lambda: psutil.Process(child.pid).children())
    child.kill()
    assert_gone(started)
    assert tmp_path.exists(), "the next child may read it"


def test_what_a_child_started_is_killed_even_without_its_guard() -> None:
    child = Child(FAMILY, Death.GUARD)
    leader = psutil.Process(child.pid)
    until(lambda: len(leader.children()) == 2)
    started = leader.children()
    guard = next(process for process in started if process.cmdline() == leader.cmdline())
    guard.kill()
    leader.kill()
    assert child.ends_within(HANG_S)
    assert_gone(started)


def test_a_default_timeout_of_sockets_does_not_reach_the_pipe() -> None:
    socket.setdefaulttimeout(5.0)
    try:
        child = Child(ECHO, Death.HANG_UP, environment={"ADDED": "yes"})
    finally:
        socket.setdefaulttimeout(None)
    pipe = child.connection()
    assert pipe.recv()[1] == "yes"
    time.sleep(0.5)  # the child waits for an answer meanwhile
    pipe.send(None)
    assert child.exit_reason(HANG_S) == "exit code 0"


@pytest.mark.parametrize(
    ("death", "code"),
    [
        (Death.HANG_UP, SLEEP),
        (Death.GUARD, BUSY),
        (Death.GUARD, FAMILY),
        pytest.param(Death.THREAD, BUSY, marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part")),
    ],
)
def test_a_child_dies_with_a_parent_that_is_killed(death: Death, code: str, tmp_path: Path) -> None:
    """So does the folder that was made for the child."""
    (tmp_path / "scratch" / "weights").mkdir(parents=True)
    scratch = tmp_path / "scratch" if death is Death.GUARD else ""
    command = [sys.executable, "-c", PARENT, death.name, code, str(scratch)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    if code == FAMILY:
        until(lambda: len(child.children()) == 2)  # the guard, and what the child started
    elif code == BUSY:
        until(lambda: child.cpu_times().user > 0.2)
    family = [child, *child.children(recursive=True)]
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert_gone(family)
    assert (tmp_path / "scratch").exists() == (death is not Death.GUARD)
