"""Metrics have one line per step after kills, power loss and damage, whatever a run resumes from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

RUN = ("embodied.yaml", "runner.save_interval=2", "runner.keep_checkpoints=10", "env.evaluation.episodes=1")
METRICS = Path("out/metrics.jsonl")


def steps() -> list[int]:
    return [int(row["step"]) for row in read_metrics("out")]


def checkpoints() -> list[str]:
    return sorted(path.name for path in Path("out/checkpoints").glob("step-*"))


def test_a_run_that_went_back_and_was_killed_leaves_no_gap(command, start):
    assert command(*RUN, "runner.max_steps=6").code == 0
    back = "runner.resume=out/checkpoints/step-00000002"
    process = start(*RUN[:1], "runner.max_steps=100000", "runner.save_interval=0", back, *RUN[2:])
    process.until(lambda: "step-00000006" not in checkpoints())
    process.kill()
    assert process.wait() == -9
    assert checkpoints() == ["step-00000002"], "checkpoints of later steps must not count any more"
    ended = command(*RUN, "runner.max_steps=8")
    assert ended.code == 0, ended.err
    assert "resumed from step 2" in ended.out
    assert steps() == list(range(9))
    assert not list(Path("out/checkpoints").glob(".left-*")), "the next checkpoint deletes what the run left"


def test_damaged_lines_are_moved_and_told(command):
    assert command(*RUN, "runner.max_steps=4").code == 0
    lines = METRICS.read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\xfe" + lines[1][2:], b"\0" * 40 + b"\n"]
    METRICS.write_bytes(lines[0] + damaged[0] + lines[2] + damaged[1] + lines[4] + b"\0" * 100)
    ended = command(*RUN, "runner.max_steps=6")
    assert ended.code == 0, ended.err
    assert "line 2, 4 cannot be read and was moved to metrics.jsonl.damaged" in ended.out.replace("\n", " ")
    assert "the metrics of step 1, 3 are lost" in ended.out.replace("\n", " ")
    assert Path("out/metrics.jsonl.damaged").read_bytes() == b"".join(damaged)
    kept = METRICS.read_bytes().splitlines(keepends=True)
    assert [kept[0], kept[2], kept[4]] == [lines[0], lines[2], lines[4]]
    assert steps() == list(range(7))


def test_damaged_samples_do_not_stop_a_resume(command):
    assert command("reasoning.yaml", "runner.max_steps=2").code == 0
    samples = Path("out/samples.jsonl")
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"\xff\n" + b"".join(lines[1:]) + b'{"step": ')
    ended = command("reasoning.yaml", "runner.max_steps=3")
    assert ended.code == 0, ended.err
    assert Path("out/samples.jsonl.damaged").read_bytes() == b"\xff\n"
    assert [json.loads(line)["step"] for line in samples.read_text().splitlines()] == [1, 2, 2, 3, 3]


@pytest.mark.parametrize("tail", ["lost", "zeros"])
def test_power_loss_takes_no_metrics_of_a_checkpoint(command, monkeypatch: pytest.MonkeyPatch, tail: str):
    """Of `metrics.jsonl` only what was synced when the last checkpoint got its name is there afterwards."""
    synced: dict[int, int] = {}  # bytes by inode
    at_rename: dict[str, bytes] = {}
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def watched_rename(source: str | Path, target: str | Path) -> None:
        if METRICS.exists():
            durable = synced.get(METRICS.stat().st_ino, 0)
            at_rename[Path(target).name] = METRICS.read_bytes()[:durable]
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "rename", watched_rename)
        assert command(*RUN, "runner.max_steps=5").code == 0
    whole = METRICS.read_bytes()
    for step in (2, 4, 5):
        durable = at_rename[f"step-{step:08d}"]
        assert durable.count(b"\n") == step + 1, f"the checkpoint of step {step} counts before its metrics are on disk"
    lost = len(whole) - len(at_rename["step-00000004"])
    os.rename("out/checkpoints/step-00000005", "out/checkpoints/.tmp-step-00000005")  # its rename is lost as well
    METRICS.write_bytes(at_rename["step-00000004"] + (b"\0" * lost if tail == "zeros" else b""))
    ended = command(*RUN, "runner.max_steps=6")
    assert ended.code == 0, ended.err
    assert "resumed from step 4" in ended.out
    assert steps() == list(range(7))
    assert METRICS.read_bytes().startswith(at_rename["step-00000004"]), "no line was lost"
