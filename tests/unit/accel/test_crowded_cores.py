import subprocess
import sys

import pytest

from rl_platform.accel.crowded_cores import waited_ns

PROGRAM = """
import os, subprocess, sys, time
import torch
from rl_platform.accel.crowded_cores import wait_passively_when_crowded

def threads():
    return len(os.listdir("/proc/self/task"))

def wait_until(condition, doing):
    limit = time.monotonic() + 60
    while not condition() and time.monotonic() < limit:
        doing()
    return condition()

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
torch.ones(1 << 20).add(1.0)
alone = threads()
end = wait_passively_when_crowded()
before = threads()
neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same core
print(wait_until(lambda: threads() > before, lambda: sum(range(100_000))))
print(before - alone, threads() - before)
neighbour.kill()
neighbour.wait()
print(wait_until(lambda: threads() == before, lambda: time.sleep(0.1)))
end()
print(wait_until(lambda: threads() == alone, lambda: time.sleep(0.1)))
"""


@pytest.mark.skipif(not waited_ns(), reason="the kernel does not count how long threads wait")
def test_beside_a_neighbour_there_are_more_threads_in_teams_than_cores_and_then_no_more() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines() == ["True", "1 1", "True", "True"], done.stderr  # a team of two on one core
