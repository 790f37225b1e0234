import os
from pathlib import Path

import pytest

from rl_platform.config import load_config
from rl_platform.config.schema.data import QuestionTask
from rl_platform.disk import read_regular
from rl_platform.envs.reasoning.sources.rows import file_rows
from rl_platform.envs.reasoning.sources.tables import READERS
from rl_platform.errors import ConfigError, DataError
from rl_platform.planner.calibration import read_measured


def test_contents_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "file", 1000) == b"x" * 1000
    with pytest.raises(ValueError, match="larger than 999 bytes"):
        read_regular(tmp_path / "file", 999)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("most", [None, 10])
def test_reading_that_would_block_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    os.mkfifo(tmp_path / "fifo")
    writer = os.open(tmp_path / "fifo", os.O_RDWR)
    monkeypatch.setattr("rl_platform.disk.stat.S_ISREG", lambda mode: True)  # as files of /proc claim to be
    with pytest.raises(BlockingIOError):
        read_regular(tmp_path / "fifo", most)
    os.close(writer)


@pytest.mark.timeout(20)
def test_what_would_never_end_is_not_read_wherever_users_name_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    columns = QuestionTask(type="jsonl", path="x")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="it is no regular file"):
            load_config(path)
        with pytest.raises(ConfigError, match="it is no regular file"):
            read_measured(path)
        with pytest.raises(DataError, match="it is no regular file"):
            file_rows(path, columns.prompt_column, columns.answer_column, READERS[".jsonl"])


def test_a_calibration_skips_lines_that_are_no_steps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": "a", "time/step": 1}\n{"step": null, "time/step": 1}\n[1]\n{"step": 2, "time/step": 3}\n')
    assert len(read_measured(file).rows) == 1
