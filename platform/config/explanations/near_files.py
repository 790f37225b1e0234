"""A hint for the path of a config that cannot be read: the file that was probably meant, or the files of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl_platform.run_files import CONFIG
from rl_platform.suggest import nearest

SHIPPED = Path(__file__).resolve().parents[3] / "configs"  # of a checkout; a wheel has none
SUFFIXES = (".yaml", ".yml")
MOST_LISTED = 8


def config_near(path: Path) -> str:
    """Returns a hint for a path that is a folder or does not exist; "" without one."""
    if (inside := path / CONFIG).is_file():
        return f"did you mean {inside}?"
    if path.is_dir():
        return _listed(path)
    if path.exists():
        return ""
    if (meant := _beside(path) or _shipped(path)) is not None:
        return f"did you mean {meant}?"
    return _listed(path.parent) if path.parent.is_dir() else f"there is no folder {path.parent}"


def _beside(path: Path) -> Path | None:
    """Returns the file in the same folder that has `path` as its name without suffix, or the nearest name."""
    files = {file.stem: file for file in _configs(path.parent)}
    stem = path.stem if path.suffix in SUFFIXES else path.name
    return files.get(stem) or files.get(nearest(stem, files) or "")


def _shipped(path: Path) -> Path | None:
    """Returns the config of that name, or else of the nearest one, below `configs/` of this folder or the checkout."""
    for folder in (Path("configs"), SHIPPED):
        files: dict[str, Path] = {}
        for file in sorted(folder.rglob("*.yaml"), key=lambda file: (file.parent.name != path.parent.name, file)):
            files.setdefault(file.stem, file)
        if (close := path.stem if path.stem in files else nearest(path.stem, files, 0.8)) is not None:
            return files[close]
    return None


def _configs(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.glob("*")) if file.suffix in SUFFIXES and file.is_file())


def _listed(folder: Path) -> str:
    names = [file.name for file in _configs(folder)]
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{folder} holds {', '.join(names[:MOST_LISTED])}{more}" if names else f"{folder} holds no YAML file"
