"""Faults 5, 6 and 7: kills at every point of a checkpoint write, damage of every kind, a full disk.

Kills are real: a forked child saves and sends itself SIGKILL at the n-th file operation.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_disk import small_disk

from rl_platform.checkpoint import verify
from rl_platform.checkpoint import write as module
from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.checkpoint.write import CheckpointStore, HashingWriter, Part, Shards
from rl_platform.engines.training.sharded_state import ShardedTensor, state_bytes
from rl_platform.engines.training.state_files import read_whole, write
from rl_platform.errors import CheckpointError
from rl_platform.run_files import MANIFEST


def parts(value: int) -> dict[str, Part]:
    """Shards of a learner, as its ranks write them, and a part that is one file."""
    state = {"w": ShardedTensor.of(torch.full((1000,), float(value)))}
    return {
        "actor": Shards(state_bytes(state), lambda folder: write(state, folder)),
        "critic": {"w": torch.arange(500.0) + value, "step": value},
    }


def assert_holds(checkpoint: Checkpoint, value: int) -> None:
    assert torch.equal(read_whole(checkpoint.file("actor"))["w"], torch.full((1000,), float(value)))
    critic = checkpoint.load("critic")
    assert torch.equal(critic["w"], torch.arange(500.0) + value)
    assert critic["step"] == value


# ------------------------------------------------------------------------------------------------- 5: kills


def _save_and_die(folder: Path, step: int, value: int, point: int) -> int:
    """In a forked child: save `step` and die at file operation `point`. Returns its wait status, 0: not killed."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(operation: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*args, **kwargs)

            return wrapped

        try:
            store = CheckpointStore(folder, keep=2)
            for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
                setattr(os, name, dying(getattr(os, name)))
            HashingWriter.write = dying(HashingWriter.write)
            store.save(step, parts(value))
        finally:
            os._exit(0 if count < point else 1)
    return os.waitpid(child, 0)[1]


def _kill_everywhere(start: Path, step: int, value: int) -> list[int]:
    """Die at operation 1, 2, 3 ... until the save survives. Returns the newest good step after each kill."""
    newest, folder, left = [], start.parent / "killed", set[frozenset[int]]()
    for point in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        status = _save_and_die(folder, step, value, point)
        if status == 0:
            return newest
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        store = CheckpointStore(folder, keep=2)
        names = {entry.name for entry in folder.iterdir()}
        assert names == {f"step-{s:08d}" for s in store.steps()}, "leftovers were not swept"
        found = store.latest()
        newest.append(found.step)
        if found.step != step:
            assert_holds(found, found.step)
        if (steps := frozenset(store.steps())) not in left:
            left.add(steps)
            store.save(step, parts(value))  # life goes on
            assert_holds(store.latest(), value)
    raise AssertionError("the save never finished")


def test_kill_at_every_point_of_a_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(10, parts(10))
    store.save(20, parts(20))
    newest = _kill_everywhere(store.folder, step=30, value=30)
    assert len(newest) > 20  # mkdir, each write of each part, each sync, both renames, each unlink of the retention
    assert newest[0] == 20
    assert newest[-1] == 30
    assert newest == sorted(newest), "once renamed, the new step must stay"


def test_kill_while_a_step_is_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(30, parts(30))
    newest = _kill_everywhere(store.folder, step=30, value=31)
    assert len(newest) > 20
    assert set(newest) == {30}, "the old version of the step must be there until the new one is"


# ------------------------------------------------------------------------------------------------ 6: damage


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20):
        store.save(step, parts(step))
    return store


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def zero_block(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[512:1024] = bytes(512)
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


SHARD = "actor/__0_0.distcp"
DAMAGES = [flip_bit, zero_block, truncate, grow, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["actor/__0_0.distcp", "actor/.metadata", "critic.pt", MANIFEST])
def test_damage_is_detected_and_named(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str
) -> None:
    path = store.folder / "step-00000020"
    before = (path / name).read_bytes()
    damage(path / name)
    assert not (path / name).exists() or (path / name).read_bytes() != before  # the fault is real

    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found.step == 10
    assert_holds(found, 10)
    assert name in caplog.text
    assert "step-00000020" in caplog.text

    with pytest.raises(CheckpointError, match=name) as raised:
        store.open(path)
    assert raised.value.exit_code == 65


def test_every_byte_of_the_manifest_counts(store: CheckpointStore) -> None:
    file = store.folder / "step-00000020" / MANIFEST
    good = file.read_bytes()
    for index in range(len(good)):
        bad = bytearray(good)
        bad[index] ^= 1 << (index % 8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError):
            verify._read_manifest(file.parent)


def test_all_damaged_files_are_named_at_once(store: CheckpointStore) -> None:
    path = store.folder / "step-00000020"
    flip_bit(path / SHARD)
    (path / "critic.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"{SHARD} does not match.*critic\.pt: No such file"):
        store.open(path)


def test_swapped_steps_are_detected(store: CheckpointStore) -> None:
    first, second = store.folder / "step-00000010", store.folder / "step-00000020"
    first.rename(store.folder / "aside")
    second.rename(first)
    (store.folder / "aside").rename(second)
    assert json.loads((second / MANIFEST).read_bytes())["step"] == 10  # the fault is real
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used") as raised:
        store.latest()
    assert str(raised.value).count("Checkpoints were swapped") == 2
    with pytest.raises(CheckpointError, match=r"written for step 10.*step-00000010"):
        store.open(second)


def test_swapped_parts_are_detected(store: CheckpointStore) -> None:
    first, second = (store.folder / name / SHARD for name in ("step-00000010", "step-00000020"))
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match=f"{SHARD} does not match"):
        store.open(second.parents[1])


def test_damaged_checkpoints_do_not_push_good_ones_out(store: CheckpointStore) -> None:
    store.save(30, parts(30))
    for step in (20, 30):
        flip_bit(store.folder / f"step-{step:08d}" / SHARD)
    resumed = CheckpointStore(store.folder, keep=2)
    assert resumed.latest().step == 10
    resumed.save(40, parts(40))
    assert resumed.steps() == [10, 40]


def test_nothing_is_deleted_when_the_new_checkpoint_does_not_verify(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, injected = module.sync_folder, []

    def corrupt_then_sync(folder: Path) -> None:
        if folder.name.startswith(".tmp-"):
            flip_bit(folder / SHARD)
            injected.append(folder)
        sync(folder)

    monkeypatch.setattr(module, "sync_folder", corrupt_then_sync)
    tight = CheckpointStore(store.folder, keep=1)
    with pytest.raises(CheckpointError, match=f"{SHARD} does not match"):
        tight.save(30, parts(30))
    assert injected
    assert tight.latest().step == 20


# --------------------------------------------------------------------------------------------- 7: full disk


def test_refused_before_anything_is_written_when_the_disk_is_too_full(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * (1000 + 500)
    asked = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=free)

    free = needed - 1

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(os, "mkdir", lambda *_: pytest.fail("the save was started"))
    with pytest.raises(CheckpointError, match=r"not enough disk space.*untouched"):
        store.save(30, parts(30))
    assert asked == [store.folder]
    assert store.latest().step == 20
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = needed
    assert store.save(30, parts(30)).step == 30
    free = 2 * needed - 1  # at the start of a run: beside the old checkpoint there must be room for the new one
    with pytest.raises(CheckpointError, match=r"twice that is required"):
        store.require_space(needed)
    free = 2 * needed
    store.require_space(needed)


@pytest.mark.parametrize("call", range(1, 7))  # shards, their index, their folder, a file, the manifest, the step
def test_disk_full_while_syncing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    fsync, count = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 30 could not be written.*No space left.*on disk: 10, 20"):
        store.save(30, parts(30))
    assert count >= call
    assert_holds(store.latest(), 20)
    assert {entry.name for entry in store.folder.iterdir()} == {"step-00000010", "step-00000020"}


@pytest.mark.parametrize(
    "full", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_failure_in_every_write_of_a_part(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, full: BaseException
) -> None:
    """torch turns an error of its target into a RuntimeError about positions; the user must see the real one."""

    class Disk:
        """Fails at write number `left`."""

        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            nonlocal left
            left -= 1
            if left == 0:
                raise full
            return self.file.write(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    init = HashingWriter.__init__
    monkeypatch.setattr(HashingWriter, "__init__", lambda self, file, pool: init(self, Disk(file), pool))
    point = 0
    while True:
        point += 1
        left = point
        raised = None
        try:
            store.save(30, parts(30))
        except (CheckpointError, KeyboardInterrupt) as error:
            raised = type(error)
        if left > 0:
            break
        assert raised is (CheckpointError if isinstance(full, OSError) else KeyboardInterrupt)
        assert {entry.name for entry in store.folder.iterdir()} == {"step-00000010", "step-00000020"}
    assert point > 50
    assert_holds(store.latest(), 30)


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_a_disk_that_is_really_full(tmp_path: Path, part: str) -> None:
    """On a 1 MB file system with the space check passing: another writer takes the space during the save."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = CheckpointStore(disk / "checkpoints", keep=2)
        store.save(10, parts(10))
        store.require_space = lambda estimate, times: None  # the check came before the other writer
        state = {"w": ShardedTensor.of(torch.ones(1_000_000))}
        big = {"actor": Shards(0, lambda folder: write(state, folder)), "critic": {"w": torch.ones(1_000_000)}}
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(20, {part: big[part]})
        assert_holds(store.latest(), 10)
        assert store.steps() == [10]
