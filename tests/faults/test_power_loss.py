"""Fault 24: the power fails, and of the writes that were not synced any part is on the disk.

The file operations of real saves and of a whole run are recorded and replayed up to every point (`power_loss`).
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from power_loss import Recording, recording

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.checkpoint.write import CheckpointStore, Part, Shards
from rl_platform.engines.training.sharded_state import ShardedTensor, state_bytes
from rl_platform.engines.training.state_files import read_whole, write
from rl_platform.errors import CheckpointError
from rl_platform.metrics import read_metrics

SAMPLES = 4  # states of the disk for each point of time


def parts(value: int) -> dict[str, Part]:
    state = {"w": ShardedTensor.of(torch.full((400,), float(value)))}
    return {
        "actor": Shards(state_bytes(state), lambda folder: write(state, folder)),
        "env": {"w": torch.arange(300.0) + value},
    }


def assert_whole(checkpoint: Checkpoint) -> None:
    assert torch.equal(read_whole(checkpoint.file("actor"))["w"], torch.full((400,), float(checkpoint.step)))
    assert torch.equal(checkpoint.load("env")["w"], torch.arange(300.0) + checkpoint.step)


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Five saves, a step that is saved again, and a run that goes back to an earlier step; two are kept."""
    folder = tmp_path_factory.mktemp("saves") / "checkpoints"
    with recording(folder) as record:
        store = CheckpointStore(folder, keep=2)
        for step in (10, 20, 30, 30):
            store.save(step, parts(step))
            record.mark(step)
        store.set_aside(20)
        record.mark("back")
        for step in (21, 22):
            CheckpointStore(folder, keep=2).save(step, parts(step))
            record.mark(step)
    return record


def expected(marks: list[object]) -> set[int]:
    """The steps of which one must be found after these marks."""
    order = [10, 20, 30, 30, "back", 21, 22]
    assert marks == order[: len(marks)]
    possible = {0: {0, 10}, 1: {10, 20}, 2: {20, 30}, 3: {30}, 4: {20, 30}, 5: {20, 21}, 6: {21, 22}, 7: {22}}
    return possible[len(marks)]


def test_every_point_of_a_save(saves: Recording, tmp_path: Path) -> None:
    draw, disk, tried = random.Random(1), tmp_path / "disk", set[tuple[int, tuple[str, ...]]]()
    for time in range(saves.end + 1):
        for _ in range(SAMPLES):
            shutil.rmtree(disk, ignore_errors=True)
            saves.after_loss(time, draw, disk)
            tried.add((time, tuple(sorted(str(path.relative_to(disk)) for path in disk.rglob("*")))))
            try:
                found = CheckpointStore(disk, keep=2).latest()
            except CheckpointError as error:
                pytest.fail(f"at operation {time}: {error}")
            assert (found.step if found else 0) in expected(saves.holding(time)), f"at operation {time}"
            if found is not None:
                assert_whole(found)
    print(f"{(saves.end + 1) * SAMPLES} states of the disk after {saves.end} operations, {len(tried)} sets of files")
    assert len(tried) > 150, "the states are too much alike"


def test_without_a_sync_the_replay_finds_the_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same states for a writer that does not sync its files, as a test of the test."""
    monkeypatch.setattr("rl_platform.checkpoint.write.sync", lambda file: file.flush())
    with recording(tmp_path / "checkpoints") as record:
        store = CheckpointStore(tmp_path / "checkpoints", keep=2)
        store.save(10, {"env": {"w": torch.arange(300.0)}})
    draw, damaged = random.Random(1), 0
    for number in range(50):
        record.after_loss(record.end, draw, disk := tmp_path / f"disk{number}")
        try:
            damaged += CheckpointStore(disk, keep=2).latest() is None
        except CheckpointError:
            damaged += 1
    assert damaged > 20


@pytest.fixture
def recorded_run(command, folder: Path) -> Recording:
    with recording(folder / "out") as record, pytest.MonkeyPatch.context() as patch:
        save = CheckpointStore.save

        def marked(store: CheckpointStore, step: int, given: object) -> Checkpoint:
            saved = save(store, step, given)
            record.mark(step)
            return saved

        patch.setattr(CheckpointStore, "save", marked)
        assert command("embodied.yaml", "runner.save_interval=1").code == 0
    return record


def test_a_run_goes_on_from_every_state_of_the_disk(command, recorded_run: Recording, folder: Path) -> None:
    (folder / "out").rename(folder / "whole")
    draw = random.Random(2)
    for time in [*sorted(draw.sample(range(recorded_run.end), 5)), recorded_run.end]:
        shutil.rmtree("out", ignore_errors=True)
        recorded_run.after_loss(time, draw, folder / "out")
        before = sorted(str(path) for path in Path("out").rglob("*"))
        ended = command("embodied.yaml", "runner.save_interval=1")
        assert ended.code == 0, (time, before, ended.err)
        saved = max((step for step in recorded_run.holding(time) if isinstance(step, int)), default=0)
        if saved == 4 and "holds a finished run" in ended.out:
            continue
        assert saved == 0 or "resumed from step" in ended.out, (time, saved, before)
        rows, whole = read_metrics("out"), read_metrics("whole")
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4], (time, saved, before)
        for row, other in zip(rows, whole, strict=True):
            clock = ("time/", "perf/")
            assert {k: v for k, v in row.items() if not k.startswith(clock)} == {
                k: v for k, v in other.items() if not k.startswith(clock)
            }
        first, second = (Checkpoint.open(Path(name, "checkpoints", "step-00000004")) for name in ("out", "whole"))
        learned = [read_whole(checkpoint.file("actor")) for checkpoint in (first, second)]
        assert all(torch.equal(learned[0][name], learned[1][name]) for name in learned[1])
