"""`rl-platform environment-server`: a server of environments in one file, for machines without the platform."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import rl_platform
import rl_platform.envs.embodied as embodied
from rl_platform import runtime

_MAIN = "from rl_platform.envs.embodied.remote.environment_server import main\nmain()\n"


def write(path: Path) -> None:
    """Writes the file. Python 3.11, numpy, gymnasium and the simulator run it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        for package in ("rl_platform", "rl_platform.envs"):
            archive.writestr(f"{package.replace('.', '/')}/__init__.py", "")
        for name, file in _modules():
            archive.write(file, name)


def _modules() -> Iterator[tuple[str, Path]]:
    """Yields the name in the archive and the file of each module that a server may import."""
    roots = [Path(folder) for folder in rl_platform.__path__]
    for file in (file for root in roots for file in sorted(root.glob("*.py")) if file.name != "__init__.py"):
        yield f"rl_platform/{file.name}", file
    for package in (runtime, embodied):
        folder, prefix = Path(package.__path__[0]), package.__name__.replace(".", "/")
        for file in sorted(folder.glob("*.py") if package is runtime else folder.rglob("*.py")):
            yield f"{prefix}/{file.relative_to(folder)}", file
