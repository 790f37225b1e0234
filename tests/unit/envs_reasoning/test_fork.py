"""Copies of a process that evaluate a sample: the limit of their memory."""

from __future__ import annotations

import mmap
import sys

import pytest

from rl_platform.envs.reasoning.answers import fork


@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit it")
def test_a_copy_may_add_memory_to_what_its_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held = bytearray(2**28)
    monkeypatch.setattr(fork, "MEMORY", 2**27)
    assert fork.in_fork(lambda: float(len(bytearray(2**26)) > 0)) == 1.0
    with pytest.raises(ValueError, match="Cannot allocate memory"):  # a bytearray may be given memory that was freed
        fork.in_fork(lambda: float(len(mmap.mmap(-1, 2**29, flags=mmap.MAP_PRIVATE))))
    assert len(held) == 2**28
