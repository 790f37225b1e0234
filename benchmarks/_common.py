"""What the benchmarks against other libraries share: a race between processes, our training loop in it, and the report.

Every contestant is a process of its own and does one lap (a PPO step, say) at a time while the others wait, so that a
busy machine slows all alike. Ratios are taken round by round, between laps that ran next to each other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rl_platform import acceleration
from rl_platform.config import load_config
from rl_platform.environment_variables import changed_variables
from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
from rl_platform.envs.embodied.spaces import read_spaces
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.launch.runtime_choice import runtime_for
from rl_platform.launch.tools.timeline import covered
from rl_platform.metrics import RunLog
from rl_platform.placement.estimates.hardware import processor
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.placement.scheduler import schedule
from rl_platform.reporter import Reporters, RunInfo
from rl_platform.runners.embodied import EmbodiedRunner
from rl_platform.runners.ppo import train
from rl_platform.runners.reasoning import ReasoningRunner
from rl_platform.runners.state import RunState
from rl_platform.runners.task_runner import TaskRunner
from rl_platform.runtime.cpu import keep_freed_memory
from rl_platform.tracing import recorder

LONG_RUN = 1_000_000  # steps or episodes: every race ends before
JOIN_S = 60.0
WORK = "perf/work_seconds"


class Lap(NamedTuple):
    """Wall seconds of one lap, CPU seconds of the contestant's process without its children, and what it tells."""

    seconds: float
    cpu_seconds: float
    numbers: Mapping[str, float]


class Turns:
    """The contestant's side of a race. It calls `next` once when it is ready and again after every lap."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._began = self._cpu_began = 0.0

    def next(self, numbers: Mapping[str, float] | None = None) -> None:
        """Report the lap that ends here and wait for the next turn. Raises SystemExit when the race is over."""
        lap = Lap(time.perf_counter() - self._began, time.process_time() - self._cpu_began, numbers or {})
        self._connection.send(lap)
        try:
            self._connection.recv()
        except EOFError:
            raise SystemExit from None
        self._began, self._cpu_began = time.perf_counter(), time.process_time()


class Entry(NamedTuple):
    """A contestant: a function of the main module, its settings, and its threads (OMP_NUM_THREADS; None: as it is)."""

    run: Callable[[Turns, argparse.Namespace], None]
    settings: argparse.Namespace
    threads: int | None = None


def race(entries: Mapping[str, Entry], warm_up: int, rounds: int) -> dict[str, list[Lap]]:
    """Laps of every contestant. In each round all of them do one, every second round in reverse order."""
    laps: dict[str, list[Lap]] = {name: [] for name in entries}
    with contestants(entries) as run_lap:
        for number in range(warm_up + rounds):
            for name in list(entries)[:: -1 if number % 2 else 1]:
                lap = run_lap(name)
                if number >= warm_up:
                    laps[name].append(lap)
    return laps


@contextmanager
def contestants(entries: Mapping[str, Entry]) -> Iterator[Callable[[str], Lap]]:
    """All of them, ready; the function has the one of this name do a lap while the others wait."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    processes = []

    def run_lap(name: str) -> Lap:
        lines[name].send(None)
        return _lap(lines[name], name)

    try:
        for name, entry in entries.items():  # one after the other, as loading is heavy too
            lines[name], theirs = context.Pipe()
            processes.append(context.Process(target=_contestant, args=(entry, theirs), name=name))
            with changed_variables({} if entry.threads is None else {"OMP_NUM_THREADS": str(entry.threads)}):
                processes[-1].start()
            theirs.close()
            _lap(lines[name], name)
        yield run_lap
    finally:
        for line in lines.values():
            line.close()
        for process in processes:
            process.join(JOIN_S)


def _contestant(entry: Entry, connection: Connection) -> None:
    """Runs in the contestant's process; what it prints is shown only if it fails."""
    screen = os.dup(2)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        try:
            entry.run(Turns(connection), entry.settings)
        except Exception:
            traceback.print_exc()
            output.seek(0)
            os.write(screen, output.read().encode())


def _lap(line: Connection, name: str) -> Lap:
    try:
        lap: Lap = line.recv()
    except EOFError:
        hint = "if it says nothing more, it was killed, for want of memory perhaps"
        raise SystemExit(f"{name} ended before the race did ({hint})") from None
    return lap


def prepare_cpu() -> None:
    """What a run does before it computes."""
    keep_freed_memory()
    acceleration.find("wait_passively_when_crowded")


def train_ours(
    turns: Turns, config_path: str, overrides: Sequence[str], prepare: Callable[[], None] = prepare_cpu
) -> None:
    """The training loop of a real run, one lap per PPO step with logging; validates once, before it is ready."""
    loaded = load_config(config_path, [*overrides, f"runner.max_steps={LONG_RUN}", "runner.val_check_interval=0"])
    config = loaded.config
    placement = schedule(config.cluster, inventory_for(config.cluster))
    with tempfile.TemporaryDirectory() as folder:
        output_dir = Path(folder)
        reporter = Reporters([_Laps(output_dir, turns)])
        reporter.start(RunInfo(config.runner.experiment_name, config.runner.task_type, output_dir, LONG_RUN))
        recorder.on = True
        prepare()
        with runtime_for(config, placement) as runtime:
            runner: TaskRunner
            if config.runner.task_type == "reasoning":
                questions = build_questions(config.data, config.runner.seed)
                order = OffloadOrder(placement.layout)
                runner = ReasoningRunner(config, runtime, reporter, output_dir, questions, order)
            else:
                env = make_env(EnvDescription.of(config.env))
                spaces = read_spaces(env, config.env.id)
                env.close()
                runner = EmbodiedRunner(config, runtime, reporter, output_dir, spaces, "actor_critic")
            train(config, runner, reporter, RunState(config, output_dir, reporter))


class _Laps(RunLog):
    """The files of a run; every finished step is a lap.

    WORK: seconds of the lap in which there was physics, inference or an optimizer step of an embodied run.
    """

    def __init__(self, output_dir: Path, turns: Turns) -> None:
        super().__init__(output_dir)
        self._turns = turns

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        work = covered((span.began, span.seconds) for span in recorder.drain() if span.kind == "work")
        self._turns.next({**metrics, WORK: work})


def print_seconds(laps: Mapping[str, Sequence[Lap]]) -> None:
    """Median wall and CPU seconds of a lap of every contestant."""
    for name, done in laps.items():
        seconds, cpu = (statistics.median(times) for times in zip(*(lap[:2] for lap in done), strict=True))
        print(f"  {name}: {seconds:.3g} s, {cpu:.3g} CPU seconds")


def total(laps: Sequence[Lap], number: str) -> float:
    return sum(lap.numbers[number] for lap in laps)


def rate(laps: Sequence[Lap], number: str) -> float:
    """Median over laps of a count per second."""
    return statistics.median(lap.numbers[number] / lap.seconds for lap in laps)


def ratios(ours: Sequence[Lap], theirs: Sequence[Lap], number: str | None = None) -> list[float]:
    """How many times faster ours was, round by round: by seconds, or by `number` per second."""
    work = [1.0 if number is None else a.numbers[number] / b.numbers[number] for a, b in zip(ours, theirs, strict=True)]
    return [done * b.seconds / a.seconds for done, a, b in zip(work, ours, theirs, strict=True)]


def print_phases(laps: Sequence[Lap]) -> None:
    """Median seconds of the phases of our step, longest first."""
    names = [name for name in laps[-1].numbers if name.startswith("time/") and "." not in name and name != "time/step"]
    found = {name: statistics.median(lap.numbers.get(name, 0.0) for lap in laps) for name in names}
    longest = sorted(found, key=lambda name: -found[name])
    print("  phases: " + ", ".join(f"{name.removeprefix('time/')} {found[name]:.3g} s" for name in longest))


def print_verdict(what: str, found: Sequence[float], target: float) -> None:
    middle = statistics.median(found)
    spread = f"{middle:.2f} ({min(found):.2f} - {max(found):.2f} over {len(found)} rounds)"
    print(f"{what}: {spread}; target {target:g}: {'met' if middle >= target else 'missed'}")


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Where and with what the numbers were measured; printed, and returned for the JSON file."""
    import torch

    found = {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    print(f"{found['cpu']}, {found['cores']} cores, {found['torch_threads']} torch threads, load {found['load'][0]:g}")
    print(f"Python {found['python']}{versions and ', ' + versions}")
    return found


def new_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="measured laps of every contestant")
    parser.add_argument("--warm-up", type=int, default=1, help="laps before that")
    parser.add_argument("--threads", type=int, help="of every contestant; without it each uses its default")
    parser.add_argument("--quick", action="store_true", help="a small smoke run, no numbers to quote")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    return parser


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")


def write_page(path: Path, text: str) -> None:
    """Writes a page and keeps its notes, which are written by hand below the heading "## Notes"."""
    _, heading, notes = path.read_text(encoding="utf-8").partition("\n## Notes\n") if path.exists() else ("", "", "")
    path.write_text(f"{text.rstrip()}\n{heading}{notes}", encoding="utf-8")
