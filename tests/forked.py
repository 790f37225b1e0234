"""Ranks of a process group as forks of one process, which has imported for all of them. No test by itself.

`main` has a script and lines of JSON as its arguments: [world size, folder, arguments]. It imports the script and calls
its `preload()` if there is one. For each line it forks that many ranks, which join a process group of their own, each
with one thread, and call the script's `main(rank, folder, *arguments)`. It prints whether all ended well. The messages
of ranks go to the error stream.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType

from launcher_forks import Launchers
from script_modules import module_of

WELL, BADLY = "all ended well", "a rank failed"


class Forked:
    """A process that forks ranks of `script`: a fork of the process of `launchers`, which has imported torch."""

    def __init__(self, script: Path, launchers: Launchers) -> None:
        self.script, self.launchers = script, launchers

    def run(self, *jobs: tuple[int, Path, list[str]], timeout: float = 500) -> None:
        """Jobs (world size, folder, arguments of the script's main), one after the other; then the process ends."""
        lines = [json.dumps([world_size, str(folder), arguments]) for world_size, folder, arguments in jobs]
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from forked import main; main()"
        process = self.launchers.start(jobs[0][1], str(self.script), *lines, code=code)
        try:
            said, errors = process.communicate(timeout)
        finally:
            process.send_signal(signal.SIGKILL, group=True)
        assert said.splitlines() == [WELL] * len(jobs), errors


def main() -> None:
    gc.disable()  # what is imported is no garbage
    path, *lines = sys.argv[1:]
    script = module_of(Path(path))
    if hasattr(script, "preload"):
        script.preload()
    gc.freeze()  # so that ranks share it
    gc.enable()
    for number, line in enumerate(lines):
        world_size, folder, arguments = json.loads(line)
        meeting = Path(folder) / f"rendezvous-{number}"
        pids = [_fork(partial(_rank, script, rank, world_size, meeting, arguments), rank) for rank in range(world_size)]
        print(WELL if _all_end_well(pids) else BADLY, flush=True)


def _rank(script: ModuleType, rank: int, world_size: int, meeting: Path, arguments: list[str]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", **options)
    script.main(rank, meeting.parent, *arguments)
    dist.destroy_process_group()


def _fork(task: Callable[[], None], rank: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        task()
        code = 0
    except BaseException:
        print(f"rank {rank}:", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # what the parent has registered for its own end is not for this process


def _all_end_well(pids: list[int]) -> bool:
    """The others would wait for one that failed until their deadline: they are ended."""
    left = set(pids)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            for other in left:
                os.waitpid(other, 0)
            return False
    return True
