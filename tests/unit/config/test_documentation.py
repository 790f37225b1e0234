"""docs/configuration.md is up to date and complete."""

from __future__ import annotations

from pathlib import Path

from rl_platform.config.describe import walk
from rl_platform.config.documentation import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "rl-platform keys > docs/configuration.md"


def test_page_names_every_key() -> None:
    page = render()
    assert [path for path, _ in walk() if f"`{path.rpartition('.')[2]}`" not in page and f"`{path}`" not in page] == []
