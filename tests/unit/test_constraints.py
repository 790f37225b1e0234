"""The versions for GPUs are those that the packages require."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def versions(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_sglang_and_what_it_pins() -> None:
    gpu = versions("gpu.txt")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["sglang"] == [f"sglang=={gpu['sglang']}"]
    assert (gpu["torch"], gpu["numba"]) == ("2.14.1", "0.65.1")


def test_the_page_lists_the_versions() -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    cpu, gpu = versions("cpu.txt"), versions("gpu.txt")
    rows = re.findall(r"^\| (\S+) \| (\d\S+) \| (\d\S+) \|", page, re.MULTILINE)
    assert rows
    for package, tested, resolved in rows:
        assert (cpu[package], gpu[package]) == (tested, resolved), package
