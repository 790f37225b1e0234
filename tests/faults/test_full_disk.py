"""A full disk under what a command writes: exit code 65 with the free space, and no target that looks complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import small_disk

from rl_platform.config.explanations.refused_paths import named_paths
from rl_platform.disk import no_space
from rl_platform.errors import DataError, WorkerError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """The folder `small`, a file system of its own of 16 KiB."""
    with small_disk(folder / "small", "16k") as disk:
        yield disk


def test_verbs_leave_nothing_on_a_full_disk(command, tool, disk: Path):
    for config in ("embodied.yaml", "reasoning.yaml"):
        ended = command(config, "runner.max_steps=1", f"runner.output_dir={config[:-5]}")
        assert ended.code == 0, ended.err
    for words in (
        ("export", "reasoning", "-o", "small/model"),
        ("export", "embodied", "-o", "small/policy"),
        ("report", "embodied", "-o", "small/report.html"),
        ("environment-server", "small/server.pyz"),
    ):
        ended = tool(*words)
        assert ended.code == 65, ended.err
        assert f"{words[-1]} cannot be written: No space left on device. Free space, as 0.02 MB are left" in ended.err
        assert "Traceback" not in ended.err
        assert list(disk.iterdir()) == []


def test_an_output_folder_on_a_full_disk(command, disk: Path):
    (disk / "other").write_bytes(bytes(16384))
    ended = command("embodied.yaml", "runner.output_dir=small/run")
    assert ended.code == 65, ended.err
    assert "small/run cannot be written: No space left on device. Free space, as 0.00 MB are left" in ended.err
    assert [path.name for path in disk.iterdir()] == ["other"]


def test_the_error_of_safetensors_is_one_of_the_disk():
    class SafetensorError(Exception):
        """The type of safetensors has no number."""

    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert str(no_space(SafetensorError(text), "model")).startswith("model cannot be written: No space left on device.")
    assert no_space(SafetensorError("invalid header"), "model") is None
    assert no_space(OSError(errno.EACCES, "Permission denied"), "model") is None


@pytest.mark.parametrize("error", [FULL, OSError(*FULL.args, "runs/a/metrics.jsonl"), WorkerError("actor[0] failed")])
def test_a_full_disk_anywhere_in_a_command(error: Exception):
    if isinstance(error, WorkerError):
        error.__cause__ = FULL
    place = getattr(error, "filename", None) or "out.png"
    error.add_note("step 3 was saved")
    named = named_paths(lambda: [("RUN", "run"), ("-o", "out.png")])
    with pytest.raises(DataError, match=f"^{place} cannot be written: No space") as raised, named:
        raise error
    assert raised.value.exit_code == 65
    assert raised.value.__notes__ == ["step 3 was saved"]
