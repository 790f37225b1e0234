"""`platform-launch` as forks of one process, which has imported for all of them. No test by itself.

Reads lines of JSON, [folder, words, stops at]; starts the command in that folder and prints its process id, then its
wait status at its end. A test may kill it in between. A launcher stops itself when it has renamed something to a path
that matches `stops at`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Launchers:
    """A process that forks launchers, one at a time; leave the block and it is gone."""

    def __init__(self) -> None:
        pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__]
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def start(self, folder: Path, *words: str, stops_at: str = "") -> int:
        """The process id of a launcher, whose output is appended to `output` in the folder."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), words, stops_at]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(self._answer())

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


def _stop_at(pattern: str) -> None:
    rename = os.rename

    def stopping(source: str, target: str) -> None:
        rename(source, target)
        if Path(target).match(pattern):
            os.kill(os.getpid(), signal.SIGSTOP)

    os.rename = stopping  # type: ignore[assignment]


def main() -> None:
    from rl_platform.launch import session  # noqa: F401 - what every launcher imports
    from rl_platform.launch.cli import main as launch
    from rl_platform.runners import embodied, reasoning  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        folder, words, stops_at = json.loads(line)
        if (pid := os.fork()) == 0:
            os.chdir(folder)
            output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["platform-launch", *words]
            if stops_at:
                _stop_at(stops_at)
            code = 1
            try:
                launch()
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
