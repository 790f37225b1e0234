"""Faults 16, 17, 18 and 20: two runs in one folder, moved metrics, no good checkpoint, a disk that is full or gone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launcher_forks import Launcher
from small_disk import small_disk
from waiting import HANG_S

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.errors import FolderInUse
from rl_platform.launch import run_lock
from rl_platform.launch.run_lock import LOCK, Holder, is_running, locked
from rl_platform.runners.watching.trace_file import Timeline
from rl_platform.step_lines import StepLines

LONG = "embodied.yaml", "runner.max_steps=100000", "runner.save_interval=1", "runner.keep_checkpoints=1"


def wait_for(pattern: str, process: Launcher) -> Path:
    return process.until(lambda: [path for path in Path().glob(pattern) if path.is_dir() or path.stat().st_size])[0]


def files(folder: str = "out") -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# 16: two runs ---------------------------------------------------------------------------------------------------------


def test_the_folder_of_a_run_is_read_by_others_and_written_by_a_second_run_only_when_the_first_is_dead(start, command):
    first = start(*LONG)
    wait_for("out/checkpoints/step-*", first)
    first.send_signal(signal.SIGSTOP)  # the folder stands still; the lock is held all the same
    assert command("--eval", "out").code == 0, "reading needs no lock"
    before = files()
    second = command(*LONG)
    assert second.code == 75
    assert f"in use by another run: process {first.pid} on {Holder.this_process().host}" in second.err
    assert "Traceback" not in second.err
    assert files() == before
    first.kill()
    first.wait()
    assert (Path("out") / LOCK).exists()
    step = int(sorted(Path("out/checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))
    ended = command(*LONG, f"runner.max_steps={step + 1}")
    assert ended.code == 0, ended.err
    assert not (Path("out") / LOCK).exists()


def test_children_do_not_keep_the_lock(tmp_path: Path):
    """A child by fork, which inherits the descriptor, outlives the holder."""
    code = f"""
import os, time
from pathlib import Path
from rl_platform.launch.run_lock import locked
lock = locked(Path({str(tmp_path)!r}))
lock.__enter__()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(FolderInUse, match=f"process {holder.pid}"), locked(tmp_path):
            pass
        assert is_running(tmp_path)
        holder.kill()
        holder.wait(HANG_S)
        assert psutil.pid_exists(child)
        assert not is_running(tmp_path), "for as long as its file was touched lately"
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK).read_bytes())["pid"] == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_look_at_the_own_lock_does_not_release_it(tmp_path: Path):
    take = "from pathlib import Path; from rl_platform.launch.run_lock import locked\n"
    take += f"with locked(Path({str(tmp_path)!r})): pass"
    with locked(tmp_path):
        assert is_running(tmp_path)
        other = subprocess.run([sys.executable, "-c", take], capture_output=True, text=True, timeout=HANG_S)
        assert f"process {os.getpid()}" in other.stderr
    assert not is_running(tmp_path)


def test_the_lock_of_another_machine_counts_while_it_is_touched(of_another_machine: Path):
    assert is_running(of_another_machine.parent)
    os.utime(of_another_machine, (time.time() - 2, time.time() - 2))
    assert not is_running(of_another_machine.parent)


@pytest.fixture
def of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a run on another machine, whose kernel's locks this one does not see."""
    monkeypatch.setattr(run_lock, "PATIENCE_S", 1.0)
    (tmp_path / LOCK).write_text('{"host": "far", "boot": "other", "pid": 7, "started": "2026-01-01T00:00:00+00:00"}')
    return tmp_path / LOCK


def test_the_lock_of_another_machine_is_taken_over_after_a_silence(of_another_machine: Path, caplog):
    with locked(of_another_machine.parent):
        assert json.loads(of_another_machine.read_bytes())["pid"] == os.getpid()
    assert "names process 7 on far" in caplog.text
    assert "counts as dead" in caplog.text


def test_the_lock_of_another_machine_that_is_alive_is_not(of_another_machine: Path, monkeypatch: pytest.MonkeyPatch):
    def sleep(seconds: float) -> None:
        os.utime(of_another_machine)

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    with pytest.raises(FolderInUse, match="process 7 on far"), locked(of_another_machine.parent):
        pass
    assert json.loads(of_another_machine.read_bytes())["host"] == "far"


def test_a_requeued_slurm_job_takes_over_the_lock_of_its_earlier_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At once, and although the kernel's lock is held, as a file server may hold it for a node that is gone."""
    code = f"""
import time
from pathlib import Path
from rl_platform.launch.run_lock import locked
with locked(Path({str(tmp_path)!r})):
    print("locked", flush=True)
    time.sleep(60)
"""
    environment = os.environ | {"SLURM_JOB_ID": "17"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as earlier:
        try:
            assert earlier.stdout is not None
            assert earlier.stdout.readline() == "locked\n"
            for job, starts in (("", ""), ("17", ""), ("18", "1")):
                monkeypatch.setenv("SLURM_JOB_ID", job)
                monkeypatch.setenv("SLURM_RESTART_COUNT", starts)
                with pytest.raises(FolderInUse, match=rf"process {earlier.pid} on .*, Slurm job 17"), locked(tmp_path):
                    pass
            monkeypatch.setenv("SLURM_JOB_ID", "17")
            with locked(tmp_path):
                assert json.loads((tmp_path / LOCK).read_bytes())["pid"] == os.getpid()
        finally:
            earlier.kill()


def test_a_requeued_slurm_job_on_another_node_does_not_wait(of_another_machine: Path, monkeypatch: pytest.MonkeyPatch):
    holder = json.loads(of_another_machine.read_text()) | {"slurm_job": "17", "slurm_starts": 1}
    of_another_machine.write_text(json.dumps(holder))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(run_lock, "_is_touched", lambda path, seconds: pytest.fail("waited"))
    with locked(of_another_machine.parent):
        assert json.loads(of_another_machine.read_bytes())["slurm_starts"] == 2


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 2.0)
    with locked(tmp_path), pytest.raises(FolderInUse), locked(tmp_path):
        pass


# 17: metrics that go away ---------------------------------------------------------------------------------------------


def test_checkpoints_stay_when_metrics_are_rotated(start):
    run, metrics = start(*LONG), Path("out/metrics.jsonl")
    for fault in (lambda: os.truncate(metrics, 0), lambda: metrics.rename("metrics.1")):
        before = wait_for("out/checkpoints/step-*", run)
        run.send_signal(signal.SIGSTOP)
        fault()
        run.send_signal(signal.SIGCONT)
        run.until(lambda before=before: not before.exists())  # a newer checkpoint has taken its place
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=HANG_S)
    assert run.returncode == 143, errors
    newest = sorted(Path("out/checkpoints").glob("step-*"))[-1]
    assert Checkpoint.open(newest).step >= 1
    assert Path("out/config.yaml").exists()


# 18: no good checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture
def two_checkpoints(command) -> list[Path]:
    assert command("embodied.yaml", "runner.max_steps=2", "runner.save_interval=1").code == 0
    return sorted(Path("out/checkpoints").glob("step-*"))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(command, two_checkpoints: list[Path]):
    for path in two_checkpoints:
        os.truncate(path / "env.pt", 10)
    before = files()
    ended = command("embodied.yaml")
    assert ended.code == 65
    for path in two_checkpoints:
        assert f"{path.name} is damaged: env.pt has 10 bytes" in ended.err
    assert "name another runner.output_dir or remove these folders" in ended.err
    assert files() == before


def test_a_finished_run_without_its_checkpoints_is_not_overwritten(command, two_checkpoints: list[Path]):
    shutil.rmtree("out/checkpoints")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    ended = command("embodied.yaml")
    assert ended.code == 2
    assert "runner.output_dir: a finished run without its checkpoints" in ended.err
    assert f"or remove {Path('out/finished').absolute()}, and they are overwritten" in ended.err
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    Path("out/finished").unlink()
    assert command("embodied.yaml", "runner.max_steps=1").code == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_checkpoints_that_cannot_be_read(
    command, two_checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch, number: int
):
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "manifest.json":
            raise OSError(number, os.strerror(number), str(path))
        return read_bytes(path)

    before = files()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        ended = command("embodied.yaml")
    assert ended.code == 65
    assert ended.err.count(os.strerror(number)) == 2
    assert files() == before


# 20: a disk that is full, gone or a mount point -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [lambda: shutil.rmtree("out"), lambda: Path("out").rename("away")])
def test_an_output_folder_that_is_deleted_or_moved(start, fault: Callable[[], object]):
    run = start("embodied.yaml", "runner.max_steps=100000")
    wait_for("out/metrics.jsonl", run)
    run.send_signal(signal.SIGSTOP)
    fault()
    run.send_signal(signal.SIGCONT)
    _, errors = run.communicate(timeout=HANG_S)
    assert run.returncode == 65, errors
    assert "was deleted or moved while the run wrote to it" in errors
    assert "Traceback" not in errors
    assert not Path("out").exists()


def test_diagnostics_that_cannot_be_written_end_no_run(command, monkeypatch: pytest.MonkeyPatch):
    """Samples, trace and TensorBoard on a full disk: each failure is reported once."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, write_text = StepLines.write, Path.write_text

    def failing_write(lines: StepLines, record: dict[str, object]) -> None:
        if "prompt" in record:
            raise full
        write(lines, record)

    def failing_text(path: Path, *arguments: object, **options: object) -> int:
        if path.name == "trace.tmp":
            raise full
        return write_text(path, *arguments, **options)

    def failing_summary(*arguments: object) -> None:
        raise full

    monkeypatch.setattr(StepLines, "write", failing_write)
    monkeypatch.setattr(Path, "write_text", failing_text)
    monkeypatch.setattr("rl_platform.trackers.experiment_log._summary", failing_summary)
    ended = command("reasoning.yaml", "runner.max_steps=2", "runner.logger_backends=[tensorboard]")
    assert ended.code == 0, ended.err
    for name in ("samples.jsonl", "trace.json", "tensorboard"):
        assert ended.out.count(f"out/{name}") == 1, ended.out
    assert Path("out/finished").exists()


def test_metrics_that_cannot_be_written_end_the_run_with_the_reason(command, monkeypatch: pytest.MonkeyPatch):
    write = StepLines.write

    def failing(lines: StepLines, record: dict[str, object]) -> None:
        if record["step"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(lines, record)

    monkeypatch.setattr(StepLines, "write", failing)
    ended = command("embodied.yaml", "runner.save_interval=1")
    assert ended.code == 65
    assert "No space left on device. Free space" in ended.err
    assert "the same command goes on from step 1" in ended.err


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """The folder `out`, a file system of its own of 1 MB."""
    with small_disk(folder / "out", "1m") as disk:
        yield disk


def test_an_output_folder_that_is_a_mount_point(command, disk: Path):
    (disk / "lost+found").mkdir()
    ended = command("embodied.yaml", "env.id=CartPole-v1", "actor.model.hidden_sizes=[2048, 2048]")
    assert ended.code == 65
    assert "not enough disk space for checkpoints" in ended.err
    assert [entry.name for entry in disk.iterdir()] == ["lost+found"]
    ended = command("embodied.yaml", "runner.max_steps=1", "runner.trace_steps=0")
    assert ended.code == 0, ended.err


def test_a_disk_that_fills_up_during_the_run(command, disk: Path, monkeypatch: pytest.MonkeyPatch):
    """Before the trace of step 1 is written, another writer takes all of it."""
    step = Timeline.step

    def fill_first(timeline: Timeline, number: int, metrics: dict[str, float]) -> None:
        if number == 1:
            with suppress(OSError), open(disk / "other", "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            assert shutil.disk_usage(disk).free == 0
        step(timeline, number, metrics)

    monkeypatch.setattr(Timeline, "step", fill_first)
    ended = command("embodied.yaml", "runner.trace_steps=1", "runner.max_steps=3", "runner.save_interval=3")
    assert ended.code == 65
    assert "trace.json was not written: No space left on device" in ended.out
    assert "Traceback" not in ended.err


def test_an_embodied_run_on_a_disk_that_is_too_small_is_refused(command, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    ended = command("embodied.yaml")
    assert ended.code == 65
    assert "twice that is required" in ended.err
    assert not Path("out").exists()


def test_check_leaves_the_output_folder_alone(command, monkeypatch: pytest.MonkeyPatch):
    """With a gradient that is not finite in every step, whose rows are kept for the user."""
    monkeypatch.setattr(FSDPEngine, "step", lambda *arguments: None)
    kept = set(Path(tempfile.gettempdir()).glob("rl-check-*/failures/*"))
    ended = command("--check", "reasoning.yaml")
    assert ended.code == 70
    assert "non-finite gradient" in ended.err
    assert not Path("out").exists()
    new = set(Path(tempfile.gettempdir()).glob("rl-check-*/failures/*")) - kept
    assert new
    for path in new:
        shutil.rmtree(path.parents[1], ignore_errors=True)


# Another config after a resume ----------------------------------------------------------------------------------------


def test_a_changed_config_is_told_and_the_earlier_one_kept(command):
    assert command("embodied.yaml", "runner.max_steps=2").code == 0
    earlier = Path("out/config.yaml").read_text()
    ended = command("embodied.yaml", "runner.max_steps=4", "actor.optim.lr=0.05", "runner.seed=9")
    assert ended.code == 0
    assert "the config changed at step 2; the earlier one is config-step-2.yaml" in ended.out
    for line in ("runner.max_steps 2 -> 4", "actor.optim.lr 0.001 -> 0.05", "runner.seed 1 -> 9"):
        assert line in ended.out
    assert Path("out/config-step-2.yaml").read_text() == earlier
    assert "lr: 0.05" in Path("out/config.yaml").read_text()


def test_an_equal_config_is_not_told(command):
    assert command("embodied.yaml", "runner.max_steps=2", "runner.save_interval=1").code == 0
    Path("out/finished").unlink()
    ended = command("embodied.yaml", "runner.max_steps=2", "runner.save_interval=1")
    assert ended.code == 0
    assert " -> " not in ended.out.replace(f"→ {Path('out').absolute()}", "")
    assert not list(Path("out").glob("config-step-*"))
