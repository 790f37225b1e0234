"""A simulated run: the phases of a plan as discrete events, with slow ranks, failures of nodes and restarts.

    collect:  wait for admission -> generate in parts -> [score] -> ready
    train:    wait for ready -> [reference] [log-probs] [values] -> [train critic] [train actor] -> sync weights
              -> validate, checkpoint

The plan gives the order and the seconds of the phases, the runtime the rules between them. Components on shared devices
take turns. Up to `runner.max_staleness` rollouts are collected ahead. Responses wait for the reward in a bounded
channel. A run restarts from its newest checkpoint if a node with a learner fails; a node without one repeats its part
of the rollout. Not covered: failures that end the launcher, or that no node is free for.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

from rl_platform.config.schema.rollout import CHANNEL_CAPACITY
from rl_platform.placement.estimates.workload import optimizer_steps
from rl_platform.placement.layout import LEARNERS
from rl_platform.planner.cost import ADVANTAGES, waves
from rl_platform.planner.discrete_events import Clock, Process
from rl_platform.planner.report import Report
from rl_platform.planner.step_timeline import EVALUATION, TRAINING

SYNC = "sync weights"
LONGEST_PAUSE_S = 60.0  # before a restart
MOST_FAILURES = 10_000  # a run with more of them is given up
HOUR = 3600.0

Seconds = Callable[[str, int], float]
"""Seconds of a phase in a step, counted from 0."""


@dataclass(frozen=True)
class Work:
    """A phase: its component, its planned seconds, and how often all its ranks wait for the slowest one."""

    component: str
    seconds: float
    barriers: int = 1


@dataclass(frozen=True)
class RunModel:
    """A run as it is simulated. Times are in seconds; `*_every` in steps, 0: only after the last step.

    works: by phase. sharing: components that take turns with each one. streams: phases that evaluate each of the
    `parts` of a rollout as it is generated. waiting: parts that may wait for the reward. ranks, nodes: by component.
    useful: seconds of a step without any loss. mtbf: of a node.
    """

    works: Mapping[str, Work]
    sharing: Mapping[str, frozenset[str]]
    ranks: Mapping[str, int]
    nodes: Mapping[str, frozenset[int]]
    useful: float
    steps: int
    streams: frozenset[str] = frozenset()
    parts: int = 1
    waiting: int = 1
    score_beside: bool = False
    staleness: int = 0
    start: float = 0.0
    validation: float = 0.0
    validation_every: int = 0
    checkpoint: float = 0.0
    checkpoint_every: int = 0
    mtbf: float = math.inf
    spread: float = 0.0
    slow_nodes: float = 0.0
    slow_factor: float = 1.0
    restarts: int = 3
    backoff: float = 5.0

    @property
    def used_nodes(self) -> tuple[int, ...]:
        return tuple(sorted(frozenset[int]().union(*self.nodes.values())))

    @property
    def fatal_nodes(self) -> frozenset[int]:
        """Nodes whose failure restarts the whole run: those with a learner, and the first, which Ray needs."""
        return frozenset({0}).union(*(nodes for name, nodes in self.nodes.items() if name in LEARNERS))

    @property
    def best_interval(self) -> float:
        """Steps between two checkpoints that lose least time; 0 without checkpoints, infinite without failures."""
        # Young (1974): sqrt(2 C M) seconds for checkpoints of C seconds and one failure in M seconds
        failures = len(self.fatal_nodes & set(self.used_nodes))
        return math.sqrt(2 * self.checkpoint * self.mtbf / failures) / self.useful if failures else math.inf


def model_of(report: Report) -> RunModel:
    """Returns the run of a plan."""
    config, layout = report.config, report.layout
    other = {work.name: work.seconds for work in report.other_work}
    works = {
        phase: Work(name, seconds, optimizer_steps(config, name) if phase in TRAINING else 1)
        for phase, (name, seconds) in report.works.items()
    }
    sharing = dict(layout.sharing)
    if config.algorithm.full_kl_in_reward and "reference" in layout.parts:  # log-probs need the reference's states
        sharing["reference"] = sharing["reference"] | {layout.policy}
        sharing[layout.policy] = sharing[layout.policy] | {"reference"}
    parts, cluster = waves(config, layout) if "generate" in works else 1, config.cluster
    simulated = cluster.simulation
    several = cluster.address is not None or not layout.one_process
    by_ray = several if cluster.runtime == "auto" else cluster.runtime == "ray"
    rows = max(1, config.rows_per_step // parts)
    return RunModel(
        works=works,
        sharing=sharing,
        ranks={name: part.ranks for name, part in layout.parts.items()},
        nodes={name: part.nodes for name, part in layout.parts.items()},
        useful=report.overlap.seconds if report.overlap else report.seconds,
        steps=config.runner.max_steps,
        streams=frozenset(phase for phase in EVALUATION if phase in works and works[phase].component in report.streams),
        parts=parts,
        waiting=max(1, CHANNEL_CAPACITY // rows),
        score_beside="rollout" not in layout.around_reward,
        staleness=config.runner.max_staleness,
        start=other.get("start", 0.0),
        validation=other.get("validation", 0.0),
        validation_every=config.runner.val_check_interval,
        checkpoint=other.get("checkpoint", 0.0),
        checkpoint_every=config.runner.save_interval,
        mtbf=simulated.node_mtbf_hours * HOUR,
        spread=simulated.spread,
        slow_nodes=simulated.slow_nodes,
        slow_factor=simulated.slow_factor,
        restarts=cluster.restarts if by_ray else 0,  # the local runtime restarts nothing
        backoff=cluster.restart_backoff_s,
    )


@dataclass(frozen=True)
class Event:
    """A phase of a step, from `start` to `stop` seconds after the run began."""

    step: int
    phase: str
    component: str
    start: float
    stop: float


@dataclass
class SimulatedRun:
    """A simulated run. kept: steps in its last checkpoint. lost: seconds by reason. ends: of the steps of its last
    attempt."""

    seconds: float = 0.0
    kept: int = 0
    finished: bool = False
    failures: int = 0
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ends: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def simulate(model: RunModel, seed: int, seconds: Seconds | None = None) -> SimulatedRun:
    """Returns the outcome of one run. seconds: of the phases; None: those of `model` with the noise of its ranks."""
    noise, failing = random.Random(f"{seed} noise"), random.Random(f"{seed} failures")
    seconds = seconds or Noise(model, noise).seconds
    failures, outcome, used, ready = _failures(model, failing), SimulatedRun(), 0, 0
    time, node = next(failures)
    while True:
        attempt = Attempt(model, outcome, ready, seconds)
        restarted: Counter[int] = Counter()  # by node without a learner
        while time < outcome.seconds:  # while nothing ran
            time, node = next(failures)
        while not outcome.finished:
            attempt.clock.run(time)
            if outcome.finished:
                break
            failed, (time, node) = node, next(failures)
            outcome.failures += 1
            if failed in model.fatal_nodes or restarted[failed] == model.restarts:
                break
            restarted[failed] += 1
            attempt.interrupt()
        outcome.seconds = attempt.clock.now
        if outcome.finished:
            return outcome
        outcome.lost["failures"] += attempt.clock.now - attempt.saved_at
        used = 0 if attempt.saved else used
        if used == model.restarts or outcome.failures >= MOST_FAILURES:
            return outcome
        pause = min(model.backoff * 2.0 ** min(used, 100), LONGEST_PAUSE_S)
        outcome.lost["failures"] += pause
        outcome.seconds += pause
        used, ready = used + 1, attempt.ready


def _failures(model: RunModel, generator: random.Random) -> Iterator[tuple[float, int]]:
    """Yields the time and the node of each failure."""
    nodes, time = model.used_nodes, 0.0
    while True:
        time += generator.expovariate(len(nodes) / model.mtbf) if model.mtbf < math.inf else math.inf
        yield time, generator.choice(nodes)


class Noise:
    """Seconds of phases that end with the slowest rank; nodes that are slow stay slow."""

    def __init__(self, model: RunModel, generator: random.Random) -> None:
        self._model, self._generator = model, generator
        nodes = model.used_nodes
        slow = set(generator.sample(nodes, round(model.slow_nodes * len(nodes))))
        self._slow = {name for name, own in model.nodes.items() if own & slow}

    def seconds(self, phase: str, step: int) -> float:
        """Returns the seconds of a phase in a step."""
        work, model = self._model.works[phase], self._model
        factor = model.slow_factor if work.component in self._slow else 1.0
        if model.spread:
            draws = (self._slowest(model.ranks[work.component]) for _ in range(work.barriers))
            factor *= sum(draws) / work.barriers
        return work.seconds * factor

    def _slowest(self, ranks: int) -> float:
        """Draws the greatest of `ranks` log-normal numbers with median 1."""
        # P(max < x) = F(x)^n, so max = F^-1(u^(1/n)) for a uniform u
        uniform = min(max(self._generator.random() ** (1 / ranks), 1e-12), 1 - 1e-12)
        return math.exp(self._model.spread * NormalDist().inv_cdf(uniform))


class Attempt:
    """The run from its newest checkpoint to a failure or to its end. ready: rollouts in the checkpoint."""

    def __init__(self, model: RunModel, outcome: SimulatedRun, ready: int, seconds: Seconds) -> None:
        self.model, self.outcome, self.seconds = model, outcome, seconds
        self.clock = Clock(outcome.seconds)
        self.saved, self.saved_at, self.ready = False, outcome.seconds, ready
        self.first = outcome.kept
        self._admitted = -1  # the last step whose rollout may be collected
        self._collected = self._scored = self.first + ready
        self._parts = self._scored_parts = 0  # of this attempt
        self._streaming = 0  # evaluations that began before the end of a rollout and did not end yet
        self._busy: set[str] = set()  # components that compute
        self._spent = defaultdict[str, float](float)  # since the newest checkpoint
        self._interrupted = -math.inf
        outcome.ends = []
        self.clock.start(self._train())
        self.clock.start(self._collect())
        if "score" in model.works:
            self.clock.start(self._score())

    def interrupt(self) -> None:
        """Makes a node without a learner fail now."""
        self._interrupted = self.clock.now

    def _train(self) -> Process:
        model, again = self.model, self.outcome.failures > 0
        yield from self._other("failures" if again else "start", model.start)
        yield from self._phase(SYNC, self.first)
        for step in range(self.first, model.steps):
            self._admitted = step + model.staleness
            yield partial(self._is_ready, step)
            for stage in (EVALUATION, (ADVANTAGES,), TRAINING):
                yield from self._stage(stage, step)
            if model.staleness < 2:
                yield self._settled
            yield from self._phase(SYNC, step)
            if self._due(step, model.validation_every):
                yield self._settled
                yield from self._acquire("rollout")
                yield from self._other("validate", model.validation)
                self._busy.discard("rollout")
            self.outcome.ends.append(self.clock.now)
            if self._due(step, model.checkpoint_every):
                yield self._settled
                yield from self._other("save", model.checkpoint)
                self._save(step + 1)
        self.outcome.finished = True

    def _save(self, steps: int) -> None:
        self.outcome.kept, self.ready = steps, self._collected - steps
        for reason, seconds in self._spent.items():
            self.outcome.lost[reason] += seconds
        self._spent.clear()
        self.saved, self.saved_at = True, self.clock.now

    def _due(self, step: int, every: int) -> bool:
        return step + 1 == self.model.steps or (every > 0 and (step + 1) % every == 0)

    def _other(self, reason: str, seconds: float) -> Process:
        yield seconds
        self._spent[reason] += seconds

    def _settled(self) -> bool:
        """Returns whether all admitted rollouts are collected."""
        return self._scored > min(self._admitted, self.model.steps - 1)

    def _is_ready(self, step: int) -> bool:
        return self._scored > step

    def _stage(self, phases: Sequence[str], step: int) -> Process:
        """Runs independent phases: side by side on different devices, in this order on shared ones."""
        model = self.model
        own = [phase for phase in phases if phase in model.works and phase not in model.streams]
        yield from self.clock.together(self._phase(phase, step) for phase in own)
        if phases is EVALUATION:
            yield lambda: self._streaming == 0

    def _collect(self) -> Process:
        """Collects the admitted rollouts in parts; a part waits if too many wait for the reward."""
        model = self.model
        phase = "generate" if "generate" in model.works else "collect"
        while self._collected < model.steps:
            step = self._collected
            yield lambda: self._collected <= self._admitted
            yield from self._acquire("rollout")
            if model.staleness > 1 and SYNC in model.works:
                yield self.seconds(SYNC, step)
            start, seconds = self.clock.now, self.seconds(phase, step) if phase in model.works else 0.0
            for streamed in model.works:
                if streamed in model.streams:
                    self.clock.start(self._stream(streamed, step))
            for _ in range(model.parts):
                yield from self._part(seconds / model.parts)
                self._parts += 1
                if model.score_beside and "score" in model.works:
                    yield lambda: self._parts - self._scored_parts <= model.waiting
            self._busy.discard("rollout")
            if phase in model.works:
                self._record(phase, step, start)
            self._collected += 1
            if "score" not in model.works:
                self._scored += 1

    def _part(self, seconds: float) -> Process:
        """Generates a part; again, after a restart, what was lost when a node failed."""
        if self._interrupted + self.model.start > self.clock.now:  # it still restarts
            yield self._interrupted + self.model.start - self.clock.now
        start = self.clock.now
        yield seconds
        while self._interrupted >= start:
            lost, start = self._interrupted - start, self.clock.now
            yield lost + self.model.start

    def _score(self) -> Process:
        """Simulates a reward model that scores each part as it is generated, or all of them after the rollout on shared
        devices."""
        model = self.model
        while self._scored < model.steps:
            step, start, seconds = self._scored, math.inf, self.seconds("score", self._scored)
            if not model.score_beside:
                yield lambda: self._collected > self._scored
            for _ in range(model.parts):
                yield lambda: self._parts > self._scored_parts
                start = min(start, self.clock.now)
                yield seconds / model.parts
                self._scored_parts += 1
            self._record("score", step, start)
            self._scored += 1

    def _stream(self, phase: str, step: int) -> Process:
        """Evaluates the parts of a rollout as they are generated."""
        self._streaming += 1
        first, start, seconds = self._parts, math.inf, self.seconds(phase, step) / self.model.parts
        for part in range(self.model.parts):
            yield partial(self._generated, first + part)
            yield from self._acquire(component := self.model.works[phase].component)
            start = min(start, self.clock.now)
            yield seconds
            self._busy.discard(component)
        self._record(phase, step, start)
        self._streaming -= 1

    def _generated(self, part: int) -> bool:
        return self._parts > part

    def _phase(self, phase: str, step: int) -> Process:
        if phase in self.model.works:
            yield from self._acquire(component := self.model.works[phase].component)
            start = self.clock.now
            yield self.seconds(phase, step)
            self._busy.discard(component)
            self._record(phase, step, start)

    def _acquire(self, component: str) -> Process:
        """Waits until no component computes on the devices of this one."""
        needed = self.model.sharing[component] | {component}
        yield lambda: self._busy.isdisjoint(needed)
        self._busy.add(component)

    def _record(self, phase: str, step: int, start: float) -> None:
        component = self.model.works[phase].component
        self.outcome.events.append(Event(step, phase, component, start, self.clock.now))
