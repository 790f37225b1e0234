"""CPU time of programs in a sandbox, and how many fit into a second of two cores.

    python benchmarks/sandbox.py

Prints CPU milliseconds of all processes per program, so that other work on the machine changes little: a program that
reads and prints (one test), ten tests of a function, and for comparison the interpreter alone.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import time
from collections.abc import Callable, Sequence

from rl_platform.envs.reasoning.sandbox.cases import Case
from rl_platform.envs.reasoning.sandbox.isolation import FLAGS, missing_layers, python
from rl_platform.envs.reasoning.sandbox.process import Limits, Sandbox
from rl_platform.envs.reasoning.sandbox.program_verdict import passes

LIMITS = Limits(cpu_s=10.0, memory_bytes=512 * 2**20)
CORES = 2


def sandboxed(program: str, cases: Sequence[Case], isolated: bool = True) -> None:
    with Sandbox(program, LIMITS, isolated=isolated) as sandbox:
        assert all(passes(case, sandbox.run(case)) for case in cases)


def cpu_s() -> float:
    """Of this process and its dead children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(name: str, run: Callable[[], object], count: int) -> None:
    run()
    began, start = time.perf_counter(), cpu_s()
    for _ in range(count):
        run()
    spent, wall = (cpu_s() - start) / count, (time.perf_counter() - began) / count
    rate = f"{CORES / spent:6.0f} a second on {CORES} cores"
    print(f"{name:34} {1000 * spent:7.1f} ms of CPU  {rate}  {1000 * wall:7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="programs of each kind")
    count = parser.parse_args().count
    if missing := missing_layers():
        raise SystemExit(f"programs cannot be isolated here: {'; '.join(missing)}")
    reading = "print(int(input()) ** 2)", [Case("49", input="7\n")]
    calling = "def square(x): return x * x", [Case(k * k, entry_point="square", arguments=[k]) for k in range(10)]
    measure("interpreter alone", lambda: subprocess.run([python(), *FLAGS, "-c", "pass"], check=True, env={}), count)
    measure("a program, 1 test", lambda: sandboxed(*reading), count)
    measure("a function, 10 tests", lambda: sandboxed(*calling), count)
    measure("a program, 1 test, isolation none", lambda: sandboxed(*reading, isolated=False), count)


if __name__ == "__main__":
    main()
