"""Identifies the code of a process: all processes of a run must have the same."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import rl_platform
from rl_platform import errors


@cache
def code_fingerprint() -> str:
    """Returns the version and a hash of all modules of this package, and the versions that pickles depend on."""
    digest = hashlib.sha256()
    for path in _modules():
        digest.update(f"{path.parent.name}/{path.name}\n".encode())
        digest.update(path.read_bytes())
    parts = [f"rl-platform {version('rl-platform')} ({digest.hexdigest()[:12]})"]
    parts += [f"{name} {version(name)}" for name in ("torch", "numpy", "ray")]
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def _modules() -> list[Path]:
    """Returns the files from which this process loads: in a checkout the package lies in several folders."""
    own, api = Path(errors.__file__).parent, Path(str(rl_platform.__file__)).parent
    areas = {path.name for path in own.iterdir() if path.is_dir()} | {"envs", "launch"}
    specs = [importlib.util.find_spec(f"rl_platform.{area}") for area in sorted(areas)]
    folders = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
    roots = sorted({*own.glob("*.py"), *api.glob("*.py")})
    return [*roots, *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
