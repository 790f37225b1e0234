"""Ranks of a process group as forks of one process, which has imported for all of them. No test by itself.

`python forked.py SCRIPT` imports SCRIPT, calls its `preload()` if it has one, and reads lines of JSON: [world size,
folder, arguments]. For each line it forks that many ranks, which join a process group of their own, each with one
thread, and call the script's `main(rank, folder, *arguments)`. It prints whether all ended well. What ranks say of
themselves stands in the error stream.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType

WELL, BADLY = "all ended well", "a rank failed"


class Forked:
    """A process that forks ranks of `script`. It starts to import at once; leave the block and it is gone."""

    def __init__(self, script: Path) -> None:
        command = [sys.executable, "-W", "ignore", __file__, str(script)]
        pipe = subprocess.PIPE
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, *jobs: tuple[int, Path, list[str]], timeout: float = 500) -> None:
        """Jobs (world size, folder, arguments of the script's main), one after the other; then the process ends."""
        lines = [json.dumps([world_size, str(folder), arguments]) for world_size, folder, arguments in jobs]
        said, errors = self.process.communicate("\n".join(lines) + "\n", timeout)
        assert said.splitlines() == [WELL] * len(jobs), errors


def main(path: Path) -> None:
    gc.disable()  # what is imported is no garbage
    script = _imported(path)
    if hasattr(script, "preload"):
        script.preload()
    gc.freeze()  # so that ranks share it
    gc.enable()
    for number, line in enumerate(sys.stdin):
        world_size, folder, arguments = json.loads(line)
        meeting = Path(folder) / f"rendezvous-{number}"
        pids = [_fork(partial(_rank, script, rank, world_size, meeting, arguments), rank) for rank in range(world_size)]
        print(WELL if _all_end_well(pids) else BADLY, flush=True)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
