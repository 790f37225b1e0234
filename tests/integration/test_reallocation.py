"""A run that moves to another placement has the data, numbers and counters of one that stays."""

from __future__ import annotations

import os
import signal
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from rl_platform.components.actor import LanguageActor
from rl_platform.launch import session
from rl_platform.launch.reallocation import reallocate
from rl_platform.metrics import read_metrics
from rl_platform.records import RolloutBatch
from rl_platform.runners import reasoning

STEPS = 4  # two before a move, two after it
WORKERS = "cluster.devices_per_node=2"
APART = "cluster.component_placement={'actor,critic,reward': 0, rollout: 1}"
ONE_OF_TWO = "cluster.component_placement={'actor,critic,rollout,reward': 0}"
LANGUAGE = (
    "reasoning.yaml",
    WORKERS,
    APART,
    f"runner.max_steps={STEPS}",
    "runner.val_check_interval=2",
)
ROBOT = (
    "embodied.yaml",
    WORKERS,
    "cluster.component_placement={actor_critic: 0, 'env,rollout': 1}",
    f"runner.max_steps={STEPS}",
    "runner.trust_checkpoint=true",
)
pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run moves to the first placement that is predicted to be faster at all, after two steps."""
    monkeypatch.setattr(reallocate, "FIRST", 1)
    monkeypatch.setattr(reallocate, "LEAST_GAIN", 1e-9)
    monkeypatch.setattr(reallocate, "PAYS_WITHIN", 10**9)
    monkeypatch.setattr(reallocate, "_steps_left", lambda config, step: 10**9)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "more",
    [(), (ONE_OF_TWO, "runner.max_staleness=2", "algorithm.rollout_is={}")],
    ids=["in turns", "rollouts collected ahead, from one process"],
)
def test_a_language_model_moves(command, joins: str, final_state, logged, scored: str, more: tuple[str, ...]):
    """More ranks of a learner add gradients in another order, so numbers agree up to rounding."""
    more = more or (joins,)
    assert command(*LANGUAGE, *more, scored, "runner.output_dir=stayed").code == 0
    moved = command(*LANGUAGE, *more, scored, "runner.output_dir=moved", "cluster.reallocate=auto")
    assert moved.code == 0, moved.err
    assert "the run moves after step 2" in moved.out
    assert "checkpoint of step 2" in moved.out
    expected, found = final_state("stayed", STEPS), final_state("moved", STEPS)
    assert found["run"] == expected["run"]
    for role in ("actor", "critic"):
        torch.testing.assert_close(found[role], expected[role], rtol=1e-5, atol=1e-6)
    stayed, rows = logged("stayed"), logged("moved")
    assert [row.get("step") for row in rows] == [row.get("step") for row in stayed]
    texts = [[row["response"] for row in each if "response" in row] for each in (stayed, rows)]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 0
    gains = [row["perf/reallocation_gain"] for row in read_metrics("moved") if "perf/reallocation_gain" in row]
    assert gains[0] > 0


@pytest.mark.usefixtures("eager")
def test_environments_move_bit_for_bit(command, joins: str, final_state, logged, differences):
    assert command(*ROBOT, joins, "runner.output_dir=stayed").code == 0
    moved = command(*ROBOT, joins, "runner.output_dir=moved", "cluster.reallocate=auto")
    assert moved.code == 0, moved.err
    assert "the run moves after step 2" in moved.out
    assert differences(final_state("stayed", STEPS), final_state("moved", STEPS)) == []
    found = differences(logged("stayed"), logged("moved"))
    assert [path for path in found if "/weights/" not in path] == []  # bytes that travel between processes


def test_a_placement_in_one_process_is_freed_when_the_run_leaves_it(command, monkeypatch: pytest.MonkeyPatch):
    """Its models would take the memory that the next placement needs."""
    runtimes, start = [], session.runtime_for

    @contextmanager
    def remembered(*arguments):
        assert [runtime() for runtime in runtimes] == [None] * len(runtimes)
        with start(*arguments) as runtime:
            runtimes.append(weakref.ref(runtime))
            yield runtime

    def leaves(watch: reallocate.Reallocation, step: int) -> bool:
        watch.target = reallocate.Placed(watch._here.config, watch._here.placement)
        return step == 1

    monkeypatch.setattr(session, "runtime_for", remembered)
    monkeypatch.setattr(reallocate.Reallocation, "leaves", leaves)
    together = "cluster.component_placement={'actor_critic,env,rollout': 0}"
    ended = command(*ROBOT, together, "runner.max_steps=3", "cluster.reallocate=auto")
    assert ended.code == 0, ended.err
    assert len(runtimes) == 2


def test_a_suggestion_is_printed_once_and_can_be_pasted(command, joins: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reallocate, "FIRST", 1)
    monkeypatch.setattr(reallocate, "LEAST_GAIN", 1e-9)
    ended = command(*LANGUAGE, joins, "cluster.reallocate=suggest")
    assert ended.code == 0, ended.err
    assert ended.out.count("To use it:\ncluster:\n  num_nodes: 1\n  component_placement:\n") == 1
    assert "the run moves" not in ended.out
    lines = ended.out.partition("To use it:\n")[2].partition("step ")[0]
    pasted = yaml.safe_load(Path("reasoning.yaml").read_text()) | yaml.safe_load(lines)
    Path("pasted.yaml").write_text(yaml.safe_dump(pasted))
    again = command("pasted.yaml", WORKERS, "--plan")
    assert again.code == 0, again.err


BROKEN = """
from pathlib import Path

if Path("broken").exists():
    Path("broken").unlink()
    raise RuntimeError("this start fails")

def score(response, answer, metadata):
    return float(len(response.encode()) % 3 == 0)

def breaks(step, metrics):
    Path("broken").touch()
"""


@pytest.mark.usefixtures("eager")
def test_a_run_goes_back_if_the_new_placement_does_not_start(
    command, joins: str, folder: Path, monkeypatch, final_state, differences
):
    (folder / "own_code.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(folder)
    own = joins, "reward.type=own_code:score"
    assert command(*LANGUAGE, *own, "runner.output_dir=stayed").code == 0
    (folder / "broken").unlink(missing_ok=True)
    moves = "runner.callbacks=[own_code:breaks]", "cluster.reallocate=auto", "runner.output_dir=moved"
    ended = command(*LANGUAGE, *own, *moves)
    assert ended.code == 0, ended.err
    assert "the run does not start on" in ended.out
    assert "this start fails" in ended.out
    assert "and stays there" in ended.out
    assert differences(final_state("stayed", STEPS), final_state("moved", STEPS)) == []


class DiesOnce(LanguageActor):
    """Its process is killed in the fourth step, the second one after the move. The first one was saved."""

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        if step == 3 and self.context.rank == 0 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(batch, step)


@pytest.mark.usefixtures("eager")
def test_a_run_that_dies_after_a_move_stays_on_its_first_placement(command, joins: str, scored: str, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # processes of the run import `DiesOnce`
    monkeypatch.setattr(reasoning, "LanguageActor", DiesOnce)
    restarts = "cluster.restarts=1", "cluster.restart_backoff_s=0.1", "runner.save_interval=1"
    ended = command(*LANGUAGE, joins, scored, *restarts, "cluster.reallocate=auto")
    assert Path("killed").exists(), ended.err
    assert ended.code == 0, ended.err
    assert "resumed from step 3" in ended.out
    assert ended.out.count("the run moves after step") == 1
    assert "the run moves after step 2" in ended.out
    assert "the run failed on " in ended.out
