"""Ranks of a process group as forks of one process, which has imported for all of them. No test by itself.

`python forked.py SCRIPT` imports SCRIPT, calls its `preload()` if it has one, and reads lines of JSON: [world size,
folder, arguments]. For each line it forks that many ranks, which call the script's `main(rank, world_size, folder,
*arguments)`, and prints whether all ended well. What ranks say of themselves stands in the error stream.
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
    for line in sys.stdin:
        world_size, folder, arguments = json.loads(line)
        pids = [_fork(script, rank, world_size, Path(folder), arguments) for rank in range(world_size)]
        print(WELL if _all_end_well(pids) else BADLY, flush=True)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _fork(script: ModuleType, rank: int, world_size: int, folder: Path, arguments: list[str]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        script.main(rank, world_size, folder, *arguments)
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
