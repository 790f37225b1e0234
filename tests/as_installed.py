"""The package as a wheel lays it out, from the folders of the checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "api": "rl_platform",
    "platform": "rl_platform",
    "envs": "rl_platform/envs",
    "launch": "rl_platform/launch",
}


def lay_out(target: Path) -> None:
    """Copies the folders to `target / "rl_platform"`."""
    for folder, package in FOLDERS.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, target / package, ignore=ignored, dirs_exist_ok=True)
