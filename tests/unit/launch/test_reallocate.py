"""When a run proposes another placement, and when it moves. The measured times are invented."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rl_platform.errors import Deadline, HostDied, WorkerDied
from rl_platform.launch.placed_config import PlacedConfig, load
from rl_platform.launch.reallocation.reallocate import EVERY, FAILED, FIRST, Placed, Reallocation, reallocating
from rl_platform.reporter import Reporters
from rl_platform.runners.ppo import LEFT

PLACEMENT = "cluster.component_placement={'actor,critic,reward': 1-3, rollout: 0}"
# generation on one of four workers takes most of a step
SLOW = {"generate": 8.0, "log-probs": 0.2, "values": 0.2, "train critic": 0.6, "train actor": 0.6}
BALANCED = {"generate": 0.01, "log-probs": 0.01, "values": 0.01, "train critic": 0.01, "train actor": 0.01}


class Notes(Reporters):
    def __init__(self) -> None:
        super().__init__([])
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase(self, name: str) -> Any:
        return nullcontext()


class Run:
    """A run whose steps take invented seconds."""

    def __init__(self, asked: str, *overrides: str) -> None:
        given = ("cluster.devices_per_node=4", PLACEMENT, f"cluster.reallocate={asked}", "runner.max_steps=1000")
        loaded, placement, self.inventory = load("reasoning.yaml", [*given, *overrides])
        self.loaded, self.placement, self.notes, self.steps = loaded, placement, Notes(), 0
        self.here = Placed(loaded.config, placement)
        self.watch = Reallocation(loaded, self.here, self.inventory, self.notes)
        self.watch.step(0, {"time/load": 2.0})

    def after(self, count: int, seconds: dict[str, float]) -> bool:
        """Whether the run leaves after one of `count` steps."""
        for _ in range(count):
            self.steps += 1
            times = {f"time/{phase}": each for phase, each in seconds.items()}
            self.watch.step(self.steps, times | {"time/step": sum(seconds.values())})
            if self.watch.leaves(self.steps):
                return True
        return False

    def move(self) -> None:
        assert self.watch.target is not None
        self.here = self.watch.target
        self.watch.arrive(self.here)

    @property
    def gain(self) -> float:
        return self.notes._added["perf/reallocation_gain"]


pytestmark = pytest.mark.usefixtures("folder")


def test_a_faster_placement_is_suggested_once():
    run = Run("suggest")
    assert not run.after(FIRST, SLOW)
    assert run.notes.notes == [], "too few steps: the first one is a warm-up"
    assert not run.after(1, SLOW)
    (note,) = run.notes.notes
    assert note.startswith("a step takes 9.6 s on actor,critic,reward: 1-3, rollout: 0. It would take ")
    assert 'To use it:\ncluster:\n  num_nodes: 1\n  component_placement:\n    actor,rollout,reward: "0-2"' in note
    assert 0.2 < run.gain < 1
    assert not run.after(3 * EVERY, SLOW)
    assert len(run.notes.notes) == 1


def test_a_balanced_run_gets_no_suggestion_until_it_is_slow():
    whole = "cluster.component_placement={'actor,critic,rollout,reward': 0-3}"
    run = Run("suggest", whole)
    assert not run.after(FIRST + 1, SLOW)
    assert run.notes.notes == []
    assert run.gain == 0
    run = Run("auto", whole)
    assert not run.after(FIRST + 1 + 2 * EVERY, SLOW)


def test_a_run_moves_if_that_pays_within_ten_steps():
    run = Run("auto")
    assert run.after(FIRST + 1, SLOW)
    assert "the run moves after step 6" in run.notes.notes[-1]
    run.move()
    assert run.here.text == "actor,rollout,reward: 0-2, critic: 3"
    assert run.here.placement.world_size("rollout") == 3
    assert run.here.config.data == run.loaded.config.data


def test_a_run_stays_if_a_move_costs_more_than_ten_steps_save():
    run = Run("auto")
    run.watch._start_s = 1000.0
    assert not run.after(FIRST + 1 + 2 * EVERY, SLOW)
    (note,) = run.notes.notes
    assert "a move must pay within 10 steps" in note


def test_a_run_that_soon_ends_stays():
    run = Run("auto", f"runner.max_steps={FIRST + 2}")
    run.watch._start_s = 6.0  # two steps would pay for it, one does not
    assert not run.after(FIRST + 1, SLOW)
    assert "the run stays" in run.notes.notes[-1]


def test_a_run_goes_back_once_and_then_stays():
    """All new placements are slower than the first one, to which the run returns once."""
    run = Run("auto")
    before = run.here
    assert run.after(FIRST + 1, SLOW)
    run.move()
    slower = {phase: 3 * seconds for phase, seconds in SLOW.items()}
    moves = 0
    while run.after(FIRST + 1, slower):
        run.move()
        moves += 1
        assert moves < 20
    text = "\n".join(run.notes.notes)
    assert "after the move a step takes 28.8 s, predicted " in text
    assert run.here is before
    assert not run.after(3 * EVERY, slower), "it stays"


def test_a_run_stays_where_its_step_is_as_short_as_predicted():
    run = Run("auto")
    assert run.after(FIRST + 1, SLOW)
    run.move()
    assert not run.after(FIRST + 1 + 2 * EVERY, {phase: seconds / 4 for phase, seconds in SLOW.items()})


@pytest.mark.parametrize("steps", [0, 1])
def test_a_failed_start_goes_back_and_a_later_failure_ends_the_run(steps: int):
    run, placements, traced = Run("auto"), [], []

    def trained(config, placement, leaves, cluster_is_up=None) -> str:
        placements.append(config.cluster.component_placement)
        traced.append(config.runner.trace_steps)
        (watch,) = run.notes.sinks
        if len(placements) == 1:
            run.watch = watch
            assert run.after(FIRST + 1, SLOW)
            return LEFT
        if len(placements) == 2:
            run.after(steps, SLOW)
            raise WorkerDied("actor[0] is gone")
        assert not run.after(3 * EVERY, SLOW)
        return "max_steps"

    def whole() -> str:
        return reallocating(trained, PlacedConfig(run.loaded, run.placement, run.inventory), run.notes, Path(), None)

    if steps:
        with pytest.raises(WorkerDied):
            whole()
    else:
        assert whole() == "max_steps"
        assert placements[2] == placements[0] != placements[1]
        assert traced == [5, 0, 0], "the timeline was written: nobody would fetch more spans"
        assert any("WorkerDied: actor[0] is gone" in note for note in run.notes.notes)


@pytest.mark.parametrize("ends", [HostDied("host 1 is gone"), KeyboardInterrupt()], ids=["a death", "Ctrl-C"])
def test_a_placement_on_which_a_run_failed_is_not_taken_again(ends: BaseException):
    """The second start of the run is that of `cluster.restarts`, or the same command again."""
    placements = []

    def start(ends: BaseException | None) -> Run:
        run = Run("auto")

        def trained(config, placement, leaves, cluster_is_up=None) -> str:
            placements.append(config.cluster.component_placement)
            run.watch = run.notes.sinks[0]
            if run.after(FIRST + 1, SLOW):
                return LEFT
            run.after(1, SLOW)
            if ends is not None:
                raise ends
            return "max_steps"

        reallocating(trained, PlacedConfig(run.loaded, run.placement, run.inventory), run.notes, Path(), None)
        return run

    with pytest.raises(type(ends)):
        start(ends)
    moved = placements.copy()
    run = start(None)
    if isinstance(ends, KeyboardInterrupt):
        assert placements[2:] == moved
    else:
        assert placements[2:] == moved[:1]
        (note,) = run.notes.notes
        assert note.startswith(f"the run failed on actor,rollout,reward: 0-2, critic: 3. It stays on {run.here.text}; ")
        Path(FAILED).unlink()  # as the note says
        start(None)
        assert placements[3:] == moved


@pytest.mark.parametrize("error", [KeyError("time/step"), OSError("no space left")])
def test_an_error_of_a_comparison_does_not_end_the_run(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fails(*arguments: Any) -> None:
        raise error

    run = Run("auto")
    monkeypatch.setattr(run.watch, "_better", fails)
    assert not run.after(3 * EVERY, SLOW)
    (note,) = run.notes.notes
    assert note == f"cluster.reallocate: no other placement is predicted: {type(error).__name__}: {error}"


def test_an_error_before_any_move_ends_the_run():
    run = Run("auto")

    def trained(*arguments: Any) -> str:
        raise Deadline("rollout[0] waited 60 s")

    with pytest.raises(Deadline):
        reallocating(trained, PlacedConfig(run.loaded, run.placement, run.inventory), run.notes, Path(), None)


def test_one_device_has_one_placement(command):
    ended = command("reasoning.yaml", "cluster.reallocate=suggest")
    assert ended.code == 2
    assert "cluster.reallocate: this machine has one device, and so one placement" in ended.err
    assert command("reasoning.yaml", "cluster.reallocate=suggest", "--plan").code == 0, "it may be for another machine"
