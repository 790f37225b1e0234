"""Every example of `examples/` runs as its first line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """run(name, *overrides): runs examples/NAME.yaml from the root of the repository; returns its metrics."""

    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        monkeypatch.chdir(ROOT)
        ended = command(f"examples/{name}.yaml", f"runner.output_dir={tmp_path / 'out'}", *overrides)
        assert ended.code == 0, ended.err
        return read_metrics(tmp_path / "out")

    return run


def test_callback(run, tmp_path: Path) -> None:
    metrics = run("callback")
    assert len(metrics) < 50  # of 100
    assert [row["episode/return"] > 20 for row in metrics[-4:]] == [False, True, True, True]
    assert (tmp_path / "out" / "checkpoints").exists()
