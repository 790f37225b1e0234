"""The file of the Rerun viewer holds the pictures, rewards and returns of the drawn episode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_platform.errors import ConfigError, DataError
from rl_platform.launch.tools.rrd import write

FACTS = {"step": 3, "seed": 1, "steps_per_picture": 2, "pictures_per_second": 25.0, "rewards": [0.5, 1.0, 2.0, 4.0]}
TOLD = FACTS | {"instruction": "Open the drawer."}


def drawn(folder: Path, facts: object = FACTS) -> Path:
    import imageio.v2 as imageio

    pictures = [np.full((48, 64, 3), shade, np.uint8) for shade in (0, 100)]
    imageio.mimwrite(folder / "evaluation.mp4", pictures, format="FFMPEG", fps=25, macro_block_size=2)  # type: ignore[arg-type]
    (folder / "evaluation.json").write_text(json.dumps(facts))
    return folder


def test_pictures_rewards_and_returns(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    output = tmp_path / "episode.rrd"
    write(drawn(tmp_path, TOLD), output)
    command = [sys.executable, "-m", "rerun", "rrd", "print", "-vvv", str(output)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "with 2 rows" in shown
    assert "/reward" in shown
    assert "Open the drawer." in shown
    for value in ("7.5", "3.5", "0.5"):  # returns
        assert value in shown


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ([], "TypeError"),
        ({"step": 1}, "steps_per_picture"),
        (FACTS | {"rewards": ["a"]}, "not the facts"),
        (FACTS | {"steps_per_picture": 10**19}, "not the facts"),
    ],
)
def test_damaged_facts_are_a_data_error(tmp_path: Path, facts: object, named: str) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    with pytest.raises(DataError, match=named):
        write(drawn(tmp_path, facts), tmp_path / "episode.rrd")
    assert not (tmp_path / "episode.rrd").exists()


@pytest.mark.parametrize("content", [b"", b"film"])
def test_a_damaged_video_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    (drawn(tmp_path) / "evaluation.mp4").write_bytes(content)
    with pytest.raises(DataError, match=r"evaluation\.mp4: not a video"):
        write(tmp_path, tmp_path / "episode.rrd")


def test_a_folder_of_any_name_is_read(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="rerun-sdk is not installed")
    (folder := tmp_path / "a b\udcff.c").mkdir()
    write(drawn(folder), tmp_path / "episode.rrd")
    assert (tmp_path / "episode.rrd").stat().st_size > 1000


def test_a_run_without_a_video_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.evaluation\.video"):
        write(tmp_path, tmp_path / "episode.rrd")


def test_without_the_package_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(ConfigError, match="pip install rerun-sdk"):
        write(drawn(tmp_path), tmp_path / "episode.rrd")
