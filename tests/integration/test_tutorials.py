"""The files of the tutorials, as printed: each config loads, and each tutorial about own parts takes two steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "tutorials").glob("*.md")}
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONFIGS = [(page, name) for page, text in PAGES.items() for name, _ in FILE.findall(text) if name.endswith(".yaml")]


@pytest.fixture
def write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """write(page): its files into the working folder, which has the shipped configs; the last version of each, or the
    first."""
    (folder / "configs").symlink_to(ROOT / "configs")
    monkeypatch.syspath_prepend(str(folder))

    def files(page: str, first: bool = False) -> None:
        for name, text in reversed(FILE.findall(PAGES[page])) if first else FILE.findall(PAGES[page]):
            (folder / name).write_text(text, encoding="utf-8")
            monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)

    return files


@pytest.mark.parametrize(("page", "config"), CONFIGS, ids=lambda value: value)
def test_configs_load_and_have_a_plan(write: Any, command: Any, page: str, config: str) -> None:
    write(page)
    ended = command("--plan", config)
    assert ended.code == 0, ended.err


SMALL = ("runner.max_steps=2", "runner.logger_backends=[]")
FEW = (*SMALL, "data.val_size=10", "data.train_batch_size=8", "data.mini_batch_size=8")


@pytest.mark.parametrize(
    ("page", "config", "changes"),
    [
        ("own-environment", "cart.yaml", (*SMALL, "env.evaluation.episodes=1")),
        ("own-data", "questions.yaml", FEW),
        ("own-algorithm", "median.yaml", FEW),
        ("from-trl", "from_trl.yaml", FEW),
    ],
)
def test_own_parts_take_part_in_a_run(
    write: Any, command: Any, folder: Path, page: str, config: str, changes: tuple[str, ...]
) -> None:
    write(page)
    for script in folder.glob("make_*.py"):
        subprocess.run([sys.executable, script], cwd=folder, check=True)
    if (questions := folder / "questions.jsonl").exists():
        assert "".join(questions.read_text().splitlines(True)[:2]) in PAGES[page]
    ended = command(config, *changes)
    assert ended.code == 0, ended.err
    assert (folder / "runs" / os.listdir(folder / "runs")[0] / "finished").exists()


def test_the_check_finds_the_mistake_of_the_first_version(write: Any, command: Any) -> None:
    write("own-algorithm", first=True)
    ended = command("--check", "median.yaml")
    assert ended.code == 70
    shown = re.search(r"^PropertyFailed.*?look there first$", PAGES["own-algorithm"], re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert shown[0] in ended.err
    write("own-algorithm")
    assert command("--check", "median.yaml").code == 0
