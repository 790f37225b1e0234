"""`rl.load_run` and the table of metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rl_platform as rl

LINES = """\
{"step": 0, "val/return": 1.5}
{"step": 1, "actor/loss": 0.25}
{"step": 2, "actor/loss": null, "val/return": 3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "walker"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("runner: {}\n")
    (path / "metrics.jsonl").write_text(LINES)
    return path


def test_columns_are_arrays_with_a_number_per_step(folder: Path) -> None:
    run = rl.load_run(folder)
    assert (run.folder, run.exit_reason) == (folder, None)
    assert list(run.metrics) == ["step", "val/return", "actor/loss"]
    np.testing.assert_array_equal(run.metrics["step"], [0, 1, 2])
    np.testing.assert_array_equal(run.metrics["val/return"], [1.5, np.nan, 3.0])
    np.testing.assert_array_equal(run.metrics["actor/loss"], [np.nan, 0.25, np.nan])
    assert repr(run.metrics) == "Metrics of 3 steps: step, val/return, actor/loss"
    with pytest.raises(KeyError, match="no metric 'val/retrun'; did you mean 'val/return'"):
        run.metrics["val/retrun"]
    assert rl.load_run(run).folder == folder


def test_to_pandas(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = rl.load_run(folder).metrics.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.shape == (3, 3)


def test_what_is_no_run_is_refused(folder: Path) -> None:
    cases = {
        folder.with_name("wlaker"): rf"no such folder\n.*\n.*\n    hint: did you mean {folder}\?",
        folder.parent: "holds no run",
        folder / "metrics.jsonl": "there is no such folder",
        3: "run: names no folder",
        None: "run: names no folder",
    }
    for given, message in cases.items():
        with pytest.raises(rl.errors.ConfigError, match=message):
            rl.load_run(given)  # type: ignore[arg-type]
    (folder / "metrics.jsonl").write_text("nonsense\n" + LINES)
    with pytest.raises(rl.errors.DataError, match=r"metrics\.jsonl"):
        rl.load_run(folder).metrics  # noqa: B018
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(rl.errors.DataError, match=r"metrics\.jsonl"):
        rl.load_run(folder).metrics  # noqa: B018
