"""Hooks of mkdocs: files of the repository outside docs/ become pages of the site, so that every link works offline.

`README.md` is the first page. A linked Markdown file is a page; a linked config or source file is a page with its text.
Links are rewritten for the site only; the Markdown files keep the paths that work in the repository.
"""

from __future__ import annotations

import json
import os.path
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
CELL, CODE = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"(?<=<code>)[^<]*")
BREAKABLE = re.compile(r"([/_=]|(?<=\w{4})\.(?=\w{4}))(?=\w)")  # no break in rl.train or before .py
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".toml": "toml", ".sh": "bash", ".jsonl": "json"}
OUTSIDE = "repository"
SOURCE = "---\nsearch: {{exclude: true}}\n---\n\n# {}\n\n````{}\n{}\n````\n"  # results of a search are pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README.md and every file outside docs/ that a page links to, directly or through other pages."""
    todo = [ROOT / "README.md", *Path(config.docs_dir).rglob("*.md")]
    seen = set(todo)
    while todo:
        path = todo.pop()
        text = path.read_text(encoding="utf-8")
        if not path.is_relative_to(config.docs_dir):
            files.append(File.generated(config, _page_of(path), content=_page(path, text)))
        if path.suffix != ".md":
            continue
        linked = {_target(path, match["path"]) for match in LINK.finditer(text)}
        new = {target for target in linked if target.is_file() and target not in seen and _is_page(target)}
        seen |= new
        todo += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page from paths in the repository to paths in the site."""
    source = _source_of(page.file.src_uri)

    def site_link(match: re.Match[str]) -> str:
        target = _target(source, match["path"])
        if target.is_dir() or not target.exists():
            return match[0]  # reported by the strict build
        relative = os.path.relpath(_page_of(target), PurePosixPath(page.file.src_uri).parent)
        return relative + (match["anchor"] or "")

    return LINK.sub(site_link, markdown) if source.suffix == ".md" else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Lets keys and paths in tables break after `.`, `/`, `_` and `=`. The search index has them whole."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: BREAKABLE.sub(r"\1<wbr>", code[0]), cell[0]), output)


def _page(path: Path, text: str) -> str:
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        cells = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in json.loads(text)["cells"]]
        return "\n\n".join(f"```python\n{source}\n```" if is_code else source for source, is_code in cells)
    return SOURCE.format(_inside(path), _language(path), text)


def _target(source: Path, link: str) -> Path:
    return Path(os.path.normpath(source.parent / link))


def _is_page(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")


def _inside(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _page_of(path: Path) -> str:
    """Returns the path in the site's sources: `docs/` is its root, README.md its first page."""
    inside = _inside(path)
    if inside == "README.md":
        return "index.md"
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    return f"{OUTSIDE}/{inside}" if path.suffix == ".md" else f"{OUTSIDE}/{inside}.md"


def _source_of(page: str) -> Path:
    """Returns the file in the repository; the inverse of `_page_of`."""
    if page == "index.md":
        return ROOT / "README.md"
    if not page.startswith(f"{OUTSIDE}/"):
        return ROOT / "docs" / page
    inside = page.removeprefix(f"{OUTSIDE}/")
    return ROOT / inside if (ROOT / inside).exists() else ROOT / inside.removesuffix(".md")


def _language(path: Path) -> str:
    return LANGUAGES.get(path.suffix, "text")
