"""`cluster.reallocate`: other placements of a running job's devices, predicted from its measured times.

After some steps the measured times of the phases correct the plan's cost model, and the search looks for a faster
placement of the same devices. `suggest` prints it. `auto` also moves the run there if that pays within `PAYS_WITHIN`
steps. The loop saves the step and the components end. The components of the new placement load that checkpoint.
Loggers, counters, order of the data and random numbers continue: a move is a resume without a new process.

Not covered: other keys than `cluster.component_placement`, other devices.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from rl_platform.config import LoadedConfig
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, PlatformError, RayLost
from rl_platform.launch.placed_config import PlacedConfig, load
from rl_platform.launch.start_checks.preflight import placement_problems
from rl_platform.launch.start_checks.sharding import check_layout
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement
from rl_platform.planner.calibration import Measured, corrected_basis, measured_of
from rl_platform.planner.candidates import TRIES, Candidate
from rl_platform.planner.report import plan_report
from rl_platform.planner.search import search
from rl_platform.planner.search_text import placement_yaml
from rl_platform.planner.step_timeline import duration
from rl_platform.reporter import NOT_TRAINING, Reporter, Reporters
from rl_platform.run_files import METRICS
from rl_platform.runners.ppo import LEFT

FIRST, EVERY = 5, 20  # measured steps before the first comparison on a placement, and from one to the next
LEAST_GAIN = 0.1  # of a step; the mean error of a corrected plan is 8 % (docs/results/plan_accuracy.md)
PAYS_WITHIN = 10  # steps
FAILED = "failed-placement.txt"  # in the folder of a run: a placement to which it moved and on which it failed


Leaves = Callable[[int], bool]
Trained = Callable[[Config, Placement, Leaves, Callable[[], None] | None], str]
"""Trains on a placement from the newest checkpoint on; returns what `train` returns."""


@dataclass
class Placed:
    """A config with its placement. measured: seconds of a step on it, 0 before a measurement; predicted: by the plan
    before the move there."""

    config: Config
    placement: Placement
    predicted: float = 0.0
    measured: float = 0.0

    def same(self, other: Placed) -> bool:
        """Returns whether both have the same ranks on the same devices, in the same processes."""
        mine, others = ({frozenset(host.members) for host in one.placement.hosts} for one in (self, other))
        return mine == others and self.placement.components == other.placement.components

    @property
    def text(self) -> str:
        value = self.config.cluster.component_placement
        return ", ".join(f"{key}: {place}" for key, place in value.items())


@dataclass(frozen=True)
class Better:
    """A faster placement: seconds that it saves in each step, seconds of a move to it, and the lines of its config."""

    target: Placed
    saves: float
    cost: float
    lines: tuple[str, ...] = ()


def reallocating(
    trained: Trained, placed: PlacedConfig, reporter: Reporters, folder: Path, cluster_is_up: Callable[[], None] | None
) -> str:
    """Returns the result of `trained`, called on one placement after another.

    If the components do not start on a new placement, or its first step fails, the run returns to the previous one and
    stays there. A later failure is raised; FAILED in the folder of the run then keeps later starts on the config's
    placement.
    """
    here = Placed(placed.config, placed.placement)
    watch = Reallocation(placed.loaded, here, placed.inventory, reporter)
    reporter.sinks.append(watch)
    failed = folder / FAILED
    if failed.exists() and placed.config.cluster.reallocate == "auto":
        text = f"the run failed on {failed.read_text(encoding='utf-8', errors='replace')}. It stays on {here.text}"
        reporter.note(f"{text}; to compare placements again, delete {failed}")
        watch.settle(here)
    before: Placed | None = None
    while True:
        try:
            reason = trained(here.config, here.placement, watch.leaves, cluster_is_up)
        except PlatformError as error:
            if here.placement is not placed.placement:
                with suppress(OSError):  # as of a full disk: the cause counts
                    failed.write_text(here.text, encoding="utf-8")
            if before is None or watch.steps or isinstance(error, RayLost):
                raise
            reporter.note(f"the run does not start on {here.text}: {type(error).__name__}: {str(error).strip()}")
            reporter.note(f"the run returns to {before.text} and stays there")
            here, before = before, None
            watch.settle(here)
        else:
            if reason != LEFT:
                return reason
            assert watch.target is not None
            here, before = watch.target, here
            watch.arrive(here)
        here.config = here.config.changed({"runner.trace_steps": 0})  # trace.json holds the first placement only
        cluster_is_up = None
        gc.unfreeze()  # of `collect_as_usual`, before which the components of a run start
        gc.collect()  # models of the last placement may be in cycles
        if torch.cuda.is_initialized():
            # in this process: others now need this memory
            torch.cuda.empty_cache()


class Reallocation(Reporter):
    """Measures the steps of a run, as a sink of its reporter, and decides after a step whether the run moves.

    target: the next placement if `leaves` has returned True. steps: number of steps on the present placement. The run
    returns at most once to an earlier placement, if steps were shorter there, and then stays.
    """

    def __init__(self, loaded: LoadedConfig, here: Placed, inventory: Inventory, reporter: Reporters) -> None:
        self._loaded, self._here, self._inventory, self._reporter = loaded, here, inventory, reporter
        self._moves = loaded.config.cluster.reallocate == "auto"
        self._left: list[Placed] = []
        self._settled = self._told = False
        self._start_s = self._move_s = 0.0  # measured: of the first start, and of the last move
        self._leaving = 0.0  # the time at which the last move began
        self._latest: deque[Mapping[str, float]] = deque(maxlen=EVERY)
        self.steps = 0
        self.target: Placed | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._start_s = self._start_s or metrics.get("time/load", 0.0)
        if step > 0:
            self.steps += 1
            if self.steps > 1:  # the first one is a warm-up
                self._latest.append(metrics)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "sync weights" and self._leaving:  # the first phase after the components have their state
            self._move_s, self._leaving = time.perf_counter() - self._leaving, 0.0
        yield

    def settle(self, here: Placed) -> None:
        """Sets the placement of the run, without further comparisons."""
        self._here, self._settled, self._leaving = here, True, 0.0

    def arrive(self, here: Placed) -> None:
        """Sets the placement of the run."""
        self._settled = any(here is one for one in self._left)
        self._left.append(self._here)
        self._here, self.target, self.steps = here, None, 0
        self._latest.clear()

    def leaves(self, step: int) -> bool:
        """Returns whether the run moves to `target` now. Must be called after each step but the last one."""
        measured = self.steps - 1
        if self._settled or measured < FIRST or (measured - FIRST) % EVERY:
            return False
        with self._reporter.phase("reallocate"):
            # without validation, checkpoints and the like
            seconds = [
                each["time/step"] - sum(each.get(f"time/{name}", 0.0) for name in NOT_TRAINING) for each in self._latest
            ]
            self._here.measured = statistics.median(seconds)
            self._report_move()
            try:
                better = self._better(measured_of(Path(METRICS), list(self._latest)))
            except Exception as error:  # the step is not saved yet, and training can go on
                reason = (
                    error.problems[0].message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
                )
                self._reporter.note(f"cluster.reallocate: no other placement is predicted: {reason}")
                self._settled = True
                return False
        if better is None:
            self._reporter.add({"perf/reallocation_gain": 0.0})
            return False
        gain = better.saves / self._here.measured
        self._reporter.add({"perf/reallocation_gain": gain, "perf/reallocation_cost": better.cost})
        return self._decides(better, step)

    def _report_move(self) -> None:
        """Prints the measured step after a move beside the predicted one, once."""
        here = self._here
        if here.predicted and self._left:
            self._reporter.note(
                f"after the move a step takes {duration(here.measured)}, predicted {duration(here.predicted)}, before "
                f"{duration(self._left[-1].measured)}; the move took {duration(self._move_s)}"
            )
            here.predicted = 0.0

    def _better(self, window: Measured) -> Better | None:
        """Returns the best new or earlier placement if it saves at least `LEAST_GAIN` of a step.

        Raises ConfigError if nothing can be predicted.
        """
        here, inventory = self._here, self._inventory
        saving = here.config.changed({"runner.save_interval": 1})  # so that the plan has checkpoints
        ran = saving, here.placement, inventory
        basis = corrected_basis(window, ran, ran[0], inventory)
        report = plan_report(*ran, basis)
        present = report.overlap.seconds if report.overlap else report.seconds
        written = sum(work.seconds for work in report.other_work if work.name == "checkpoint")
        cost = self._move_s or self._start_s + 2 * written  # it is written and read
        least = LEAST_GAIN * here.measured
        known = min(self._left, key=lambda one: one.measured, default=None)
        for candidate in search(ran[0], inventory, basis, placements_only=True).candidates[:TRIES]:
            saves = present - candidate.seconds
            if saves < least or (known is not None and known.measured < here.measured - saves):
                break
            with suppress(ConfigError):
                target = self._placed(candidate)
                if not any(target.same(one) for one in (here, *self._left)):
                    target.predicted = max(here.measured - saves, candidate.seconds)
                    return Better(target, saves, cost, tuple(placement_yaml(candidate, len(inventory.nodes))))
        if known is not None and here.measured - known.measured >= least:
            return Better(known, here.measured - known.measured, cost)
        return None

    def _placed(self, candidate: Candidate) -> Placed:
        """Returns the config of the run with a candidate. Raises ConfigError if it cannot run."""
        tree = yaml.safe_load(self._loaded.resolved_yaml(with_secrets=True))
        loaded, placement, _ = load(tree, candidate.overrides)
        config = loaded.config
        if problems := list(placement_problems(config, placement)):
            raise ConfigError(problems)
        check_layout(config, placement)
        return Placed(config, placement)

    def _decides(self, better: Better, step: int) -> bool:
        """Prints the placement; returns whether the run moves there."""
        here, target = self._here, better.target
        predicted = target.predicted or target.measured
        text = (
            f"a step takes {duration(here.measured)} on {here.text}. It would take {duration(predicted)} on "
            f"{target.text} (by {'the plan, corrected by the last steps' if target.predicted else 'earlier steps'}). "
            f"A move takes about {duration(better.cost)}, as much as {better.cost / better.saves:.1f} steps save"
        )
        pays = better.saves * min(PAYS_WITHIN, _steps_left(here.config, step)) > better.cost
        if self._moves and pays:
            self._reporter.note(f"{text}: the run moves after step {step}")
            self.target, self._leaving = target, time.perf_counter()
            return True
        if not self._told:
            why = f": the run stays, as a move must pay within {PAYS_WITHIN} steps" if self._moves else ". To use it:"
            self._reporter.note("\n".join([text + why, *better.lines]))
            self._told = True
        self._settled = not self._moves
        return False


def _steps_left(config: Config, step: int) -> int:
    return config.runner.max_steps - step
