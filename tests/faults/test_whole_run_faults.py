"""Faults 6, 7 and 13 on whole runs in one process: damaged checkpoints, a disk that fills up, rewards that hang."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import psutil
import pytest
from reward_parts import SHORT_S, HungRewards
from run_results import differences, final_state, logged

from rl_platform.checkpoint.write import CheckpointStore
from rl_platform.metrics import read_metrics

STEPS = 3
RUN = "embodied.yaml", f"runner.max_steps={STEPS}", "runner.save_interval=1", "runner.keep_checkpoints=3"


@pytest.fixture
def whole(command) -> Path:
    """The folder of a run without a fault."""
    assert command(*RUN, "runner.output_dir=whole").code == 0
    return Path("whole")


def assert_equal(whole: Path) -> None:
    assert differences(final_state("out", STEPS), final_state(whole, STEPS)) == []
    assert differences(logged("out"), logged(whole)) == []


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing"])
def test_a_damaged_checkpoint_is_never_resumed(command, whole: Path, damage: str) -> None:
    shutil.copytree(whole, "out")
    (Path("out") / "finished").unlink()
    newest = Path("out/checkpoints/step-00000003")
    file = newest / "actor" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    if damage == "flipped bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    ended = command(*RUN, f"runner.resume={newest}")
    assert ended.code == 65
    assert "CheckpointError" in ended.err
    assert "step-00000003 is damaged: actor/__0_0.distcp" in ended.err
    assert ("does not match its SHA-256" in ended.err) == (damage == "flipped bit")
    assert (Path("out") / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    ended = command(*RUN)
    assert ended.code == 0, ended.err
    assert "actor/__0_0.distcp" in ended.out
    assert "Falling back to an older checkpoint" in ended.out
    assert "resumed from step 2" in ended.out
    assert_equal(whole)


def test_a_disk_that_is_full_during_a_save_costs_no_earlier_checkpoint(command, whole: Path, monkeypatch) -> None:
    save, fsync = CheckpointStore.save, os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(store: CheckpointStore, step: int, parts: object) -> object:
        os.fsync = full if step == 2 else fsync
        return save(store, step, parts)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)  # which is put back at the end
        patch.setattr(CheckpointStore, "save", failing)
        ended = command(*RUN)
    assert ended.code == 65
    assert "checkpoint of step 2 could not be written" in ended.err
    assert "No space left on device" in ended.err
    assert "Steps still on disk: 1" in ended.err
    assert command(*RUN).code == 0
    assert_equal(whole)


HANGS = """
import os, time
from pathlib import Path

def score(response, answer, metadata):
    for number in range(9):  # the first sample is that of the validation
        try:
            os.close(os.open(f"hung {number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if number == 0:
            break
        Path(f"hung {number}").write_text(f"{os.getpid()}.")
        time.sleep(1000)
    return 1.0
"""


def test_rewards_that_hang_are_masked_and_the_others_are_scored(command, folder: Path, monkeypatch) -> None:
    (folder / "hanging.py").write_text(HANGS)
    monkeypatch.syspath_prepend(folder)

    def hung() -> list[str]:
        return [text for path in folder.glob("hung *") if (text := path.read_text())]

    HungRewards(lambda pid: f"{pid}." in hung(), monkeypatch)
    few = "runner.max_steps=2", "data.val_size=1", "data.train_batch_size=16"
    settings = "reward.type=hanging:score", "reward.num_workers=4", f"reward.timeout_s={SHORT_S}"
    ended = command("reasoning.yaml", *few, *settings)
    assert ended.code == 0, ended.err
    assert len(hung()) == 8, "the fault was not injected"
    assert not any(psutil.pid_exists(int(pid.rstrip("."))) for pid in hung())
    rows = read_metrics("out")[1:]
    assert sum(row["reward/unscored"] for row in rows) == 8
    assert [row["perf/samples"] for row in rows] == [16, 16]
    assert all(row["reward/mean"] == 1.0 for row in rows), "a sample without a score is no zero"
