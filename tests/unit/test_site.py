"""The documentation site: its navigation and index hold every page, its references are up to date, and it builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from script_modules import module_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
PAGES = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
OF_RESULTS = {page for page in PAGES if page.startswith("results/")} - {"results/README.md"}  # linked from that page


def test_the_navigation_holds_every_page_once() -> None:
    listed = re.findall(r"(?<=[ :])(\S+\.md)$", NAVIGATION, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {page for page in listed if page != "index.md" and not page.startswith("repository/")} == PAGES - OF_RESULTS


def test_the_index_for_language_models_holds_every_page() -> None:
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not (DOCS / link).exists()] == []
    assert set(links) >= PAGES - OF_RESULTS


@pytest.mark.parametrize("page", ["cli.md", "api.md"])
def test_generated_pages_are_up_to_date(page: str) -> None:
    reference = module_of(DOCS / "reference.py")
    assert (DOCS / page).read_text(encoding="utf-8") == reference.PAGES[page](), "python docs/reference.py"


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    """A link or an anchor without a target is a warning."""
    pytest.importorskip("material", reason="needs mkdocs-material: the extra docs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]+)|<link[^>]*rel=\"stylesheet\"[^>]*(https?:[^\"]+)"
    )
    pages = list(tmp_path.rglob("*.html"))
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
    index = (tmp_path / "search" / "search_index.js").read_text(encoding="utf-8")  # a script: read from the disk too
    assert "reward_model.ground_truth" in index
    assert "repository/configs" not in index
    assert "<wbr>" not in index  # keys are found whole; in tables they break between words
    assert "<code>val_<wbr>check_<wbr>interval</code>" in (tmp_path / "configuration.html").read_text(encoding="utf-8")
    assert (tmp_path / "index.html").read_text(encoding="utf-8").count("<h2") > 3  # README.md
    assert (tmp_path / "repository" / "configs" / "reasoning" / "ppo_megatron.yaml.html").exists()
