"""A hint for the path of a config that cannot be read: the file that was probably meant, or the files of the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl_platform.run_files import CONFIG
from rl_platform.suggest import nearest

SHIPPED = Path(__file__).resolve().parents[3] / "configs"  # of a checkout; a wheel has none
SUFFIXES = (".yaml", ".yml")
MOST_LISTED = 8
DASHES = "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"  # into which some programs turn the hyphens of copied text


def config_near(path: Path) -> str:
    """Returns a hint for a path that is a folder or does not exist; "" without one."""
    if (inside := path / CONFIG).is_file():
        return f"did you mean {inside}?"
    if path.is_dir():
        return _listed(path)
    if path.exists():
        return ""
    if path.is_symlink():
        return f"it is a symbolic link to {path.readlink()}, which does not exist"
    if path.name[0] in DASHES:
        return f"an option begins with two hyphens: --{path.name.lstrip(f'-{DASHES}')}"
    if (meant := _meant(path)) is not None:
        return f"did you mean {meant}?"
    return _listed(path.parent) if path.parent.is_dir() else f"there is no folder {path.parent}"


def _meant(path: Path) -> Path | None:
    """Returns the config of that name, else of the nearest name: in the same folder, else a shipped one."""
    name = path.stem if path.suffix in SUFFIXES else path.name
    beside, shipped = {file.stem: file for file in _configs(path.parent)}, _shipped(path.parent.name)
    if name in beside or name in shipped:
        return beside.get(name) or shipped[name]
    if (close := nearest(name, beside)) is not None:
        return beside[close]
    return None if (close := nearest(name, shipped, 0.8)) is None else shipped[close]


def _shipped(folder: str) -> dict[str, Path]:
    """Returns the configs below `configs/` of this folder, else of the checkout, by name; of equal names the one in a
    folder named `folder`."""
    files: dict[str, Path] = {}
    for root in (Path("configs"), SHIPPED):
        for file in sorted(root.rglob("*.yaml"), key=lambda file: (file.parent.name != folder, file)):
            files.setdefault(file.stem, file)
    return files


def _configs(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.glob("*")) if file.suffix in SUFFIXES and file.is_file())


def _listed(folder: Path) -> str:
    names = [file.name for file in _configs(folder)]
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{folder} holds {', '.join(names[:MOST_LISTED])}{more}" if names else f"{folder} holds no YAML file"
