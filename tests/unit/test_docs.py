"""README and docs: examples load, links lead somewhere, and what is typed exists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(
    r"^<!-- config(?:: (?P<how>changes|extends) (?P<base>\S+))? -->\n```yaml\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
LINKS = [(page, link) for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))]


def examples() -> list[Any]:
    found = [(page, match) for page in PAGES for match in EXAMPLE.finditer(page.read_text(encoding="utf-8"))]
    return [
        pytest.param(
            match["how"],
            match["base"],
            match["text"],
            id=f"{page.name}:{match.string.count(chr(10), 0, match.start()) + 1}",
        )
        for page, match in found
    ]


def load(how: str | None, base: str | None, text: str, folder: Path) -> Config:
    """A complete example as it stands; one of a shipped config is laid over that."""
    if how == "extends":
        base, text = None, f"extends: {ROOT / str(base)}\n{text}"
    if base is None:
        path = folder / "example.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path).config
    sections = yaml.safe_load(text)
    changes = [
        f"{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()
    ]
    return load_config(ROOT / base, changes).config


@pytest.mark.parametrize(("how", "base", "text"), examples())
def test_example_loads_and_its_placement_is_possible(
    how: str | None, base: str | None, text: str, tmp_path: Path
) -> None:
    config = load(how, base, text, tmp_path)
    cluster = config.cluster
    workers = cluster.devices_per_node
    declared = Inventory.declared(cluster.num_nodes, cluster.gpus_per_node or 0)
    inventory = declared if workers is None else Inventory.emulated(cluster.num_nodes, workers)
    assert schedule(cluster, inventory).hosts


def test_there_are_examples_for_both_tasks(tmp_path: Path) -> None:
    complete = [parameter.values for parameter in examples() if parameter.values[1] is None]
    assert {load(*values, tmp_path).runner.task_type for values in complete} == {"embodied", "reasoning"}


def test_links_lead_somewhere() -> None:
    for page, link in LINKS:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page}: {link}"


REFUSED = re.compile(
    r"^```\n\$ platform-launch (?P<words>[^\n]*)\n(?P<shown>\d+ problems?:\n.*?)^```$", re.DOTALL | re.MULTILINE
)
REFUSALS = [match for page in PAGES for match in REFUSED.finditer(page.read_text(encoding="utf-8"))]


def test_typed_configs_exist_and_take_their_overrides() -> None:
    text = "".join(REFUSED.sub("", page.read_text(encoding="utf-8")) for page in PAGES)
    for line in sorted(set(re.findall(r"platform-launch (configs/.*)", text))):
        words = shlex.split(line.partition("`")[0], comments=True)
        assert load_config(ROOT / words[0], [word for word in words[1:] if "=" in word]), line


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda match: match["words"].partition(" ")[0])
def test_messages_are_what_the_command_prints(refusal: re.Match[str], command: Any, folder: Path) -> None:
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", refusal.string, re.DOTALL):
        (folder / name).write_text(text, encoding="utf-8")
    ended = command(*shlex.split(refusal["words"]))
    assert ended.code == 2
    assert ended.err == refusal["shown"]


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:api|platform|envs|launch|tests|configs|docs)/[\w./*]+)`")


def test_paths_of_the_architecture_exist() -> None:
    assert [path for path in PATH.findall(ARCHITECTURE) if not list(ROOT.glob(path.rstrip("/")))] == []


def test_the_list_of_what_to_read_first_is_true() -> None:
    listed = ARCHITECTURE.partition("<!-- read first -->")[2].partition("<!-- /read first -->")[0]
    printed = re.search(r"\*\*total\*\* \| \| \*\*([\d,]+)\*\*", listed)
    assert printed is not None
    total = int(printed[1].replace(",", ""))
    files = {file for pattern in PATH.findall(listed) for file in ROOT.glob(pattern)}
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(total - lines) <= lines / 10, f"docs/architecture.md: the total of the files listed is {lines} lines"
    assert total < 12_000


def test_the_text_environment_of_the_page_on_agents_plays() -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (text,) = (found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Echo" in found)
    names: dict[str, Any] = {}
    exec(text, names)
    game = names["Echo"]({})
    assert game.reset({}, 0) == "Say yes."
    assert (game.step("no"), game.score()) == (("Again.", 0.0, False), 0.0)
    assert (game.step(" yes"), game.score()) == (("Again.", 1.0, True), 1.0)
