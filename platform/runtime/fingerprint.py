"""Which code a process runs: processes of one run must all run the same."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def code_fingerprint() -> str:
    """Version and a hash of all modules of this package, and the versions that pickles depend on."""
    digest = hashlib.sha256()
    for package in ("rl_platform", "rl_platform.envs", "rl_platform.launch"):
        spec = importlib.util.find_spec(package)
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(folder.rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder)}\n".encode())
                digest.update(path.read_bytes())
    parts = [f"rl-platform {_version('rl-platform')} ({digest.hexdigest()[:12]})"]
    parts += [f"{name} {_version(name)}" for name in ("torch", "numpy", "ray")]
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
