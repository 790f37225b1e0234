"""A start that is hardly interrupted by garbage collection leaves no garbage; then all is as usual."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, sys, weakref
from rl_platform.garbage import collect_as_usual, collect_rarely


class Node:
    def __init__(self):
        self.me = self


def looks():
    return sum(generation["collections"] for generation in gc.get_stats())


usual, before = gc.get_threshold(), looks()
collect_rarely()
import torch
print(looks() - before < 20, sys.getsizeof(torch) > 0)

lost, kept = weakref.ref(Node()), Node()
collect_as_usual()
print(gc.get_threshold() == usual, lost() is None, gc.get_freeze_count() > 100_000)

frozen = gc.get_freeze_count()
later = weakref.ref(Node())
collect_as_usual()  # at the end of the process
print(gc.get_freeze_count() <= frozen, later() is not None)
gc.collect()
print(later() is None, kept.me is kept)
"""


def test_a_start_is_looked_through_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True True", "True True True", "True True", "True True"], done.stderr
