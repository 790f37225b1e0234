"""`rl-platform environment-server`: a server of environments in one file, for machines without the platform."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import rl_platform
import rl_platform.envs.embodied as embodied
from rl_platform.runtime import child, cpu

_MAIN = "from rl_platform.envs.embodied.remote.environment_server import main\nmain()\n"
_EMPTY = ("rl_platform", "rl_platform/envs", "rl_platform/runtime")  # packages of which the server needs some modules


def write(path: Path) -> None:
    """Writes the file. To run, it needs Python 3.11, numpy, gymnasium and the simulator."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", _MAIN)
        for package in _EMPTY:
            archive.writestr(f"{package}/__init__.py", "")
        for name, file in _modules():
            archive.write(file, name)


def _modules() -> Iterator[tuple[str, Path]]:
    """Yields the name in the archive and the file of each module that a server may import."""
    for folder in map(Path, rl_platform.__path__):
        for file in sorted(folder.glob("*.py")):
            if file.name != "__init__.py":
                yield f"rl_platform/{file.name}", file
    for module in (child, cpu):
        file = Path(str(module.__file__))
        yield f"rl_platform/runtime/{file.name}", file
    folder = Path(embodied.__path__[0])
    for file in sorted(folder.rglob("*.py")):
        yield f"rl_platform/envs/embodied/{file.relative_to(folder)}", file
