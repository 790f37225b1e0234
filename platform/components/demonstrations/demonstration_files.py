"""Reads demonstrations: HDF5 files as robomimic writes them, and folders of LeRobot data sets.

    data/EPISODE/obs/NAME, data/EPISODE/actions          HDF5
    meta/info.json, data/**/*.parquet                    LeRobot, a row per step; columns by name, `action`

Images among other parts are uint8 [T,height,width,channels] in HDF5. Not covered: environments that observe an image
alone, and images and videos of LeRobot data sets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_platform.config.schema.runner import WarmStart
from rl_platform.disk import read_regular
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, Problem

if TYPE_CHECKING:
    import h5py
    import pyarrow

KEY = "runner.warm_start"
FILE, NAMES = f"{KEY}.demonstrations", f"{KEY}.observations"
TOLERANCE = 1e-3  # of actions beyond the bounds: files store float32, or bounds that were rounded
LARGEST_INFO = 10_000_000  # bytes of meta/info.json


@dataclass(frozen=True)
class Demonstrations:
    """The steps of all episodes: observations [N,D] float32, actions [N,A] float32, or choices [N] or [N,D] int64."""

    observations: np.ndarray
    actions: np.ndarray
    episodes: int


def read_demonstrations(settings: WarmStart, spaces: EnvSpaces) -> Demonstrations:
    """Returns the demonstrations, as the policy observes and acts in an environment of these spaces.

    Raises ConfigError for a file that is missing or unreadable. Also raises it for observations or actions that have
    another size or are not finite, for actions beyond the bounds, and for pixels that are not 0 to 255.
    """
    if (problem := absent(settings)) is not None:
        raise ConfigError([problem])
    path = Path(settings.demonstrations)
    observations, actions, episodes = (_lerobot if path.is_dir() else _hdf5)(path, settings.observations)
    if not len(actions):
        raise ConfigError([Problem(FILE, "there are no steps in it", value=str(path))])
    problems = _problems(path, observations, actions, spaces)
    if problems:
        raise ConfigError(problems)
    if (scale := spaces.pixel_scale) is not None:
        observations = observations * scale
    if spaces.action.kind != "continuous":
        actions = np.rint(actions).astype(np.int64) - np.asarray(spaces.action_start)
    typed = actions.astype(spaces.policy_action_dtype).reshape(len(actions), *spaces.policy_action_shape)
    return Demonstrations(observations, typed, episodes)


def absent(settings: WarmStart) -> Problem | None:
    """Returns the problem of demonstrations that are not on this machine."""
    path = Path(settings.demonstrations)
    hint = (
        "an HDF5 file of robomimic's layout, or the folder of a LeRobot data set; that of a shipped config is recorded "
        f"by: python examples/demonstrations.py {settings.demonstrations}"
    )
    return None if path.exists() else Problem(FILE, "no such file or folder", value=str(path), hint=hint)


def _problems(path: Path, observations: np.ndarray, actions: np.ndarray, spaces: EnvSpaces) -> list[Problem]:
    problems = []
    if spaces.images:
        message, hint = "the environment observes an image alone", "let it observe a Dict with other parts too"
        problems.append(Problem(KEY, message, value=str(path), hint=hint))
    elif observations.shape[1] != spaces.observation_size:
        message = f"its observations have {observations.shape[1]} numbers"
        allowed = f"{spaces.observation_size}, as those of the environment"
        hint = "name the parts that the environment observes, in its order"
        problems.append(Problem(NAMES, message, value=str(path), allowed=allowed, hint=hint))
    elif wrong := spaces.wrong_pixels(observations):
        hint, allowed = "name the parts in the order of the environment", "whole numbers from 0 to 255"
        problems.append(Problem(NAMES, f"its images have {wrong}", value=str(path), allowed=allowed, hint=hint))
    width, continuous = spaces.action.components, spaces.action.kind == "continuous"
    if actions.shape[1] != width:
        message, allowed = f"its actions have {actions.shape[1]} numbers", f"{width}, as those of the environment"
        problems.append(Problem(FILE, message, value=str(path), allowed=allowed))
    elif continuous:
        low, high = np.asarray(spaces.action_low), np.asarray(spaces.action_high)
        least, most = actions.min(axis=0), actions.max(axis=0)
        beyond = np.flatnonzero((least < low - TOLERANCE) | (most > high + TOLERANCE))
        if len(beyond):
            number = int(beyond[0])
            message = f"number {number} of its actions is between {least[number]:g} and {most[number]:g}"
            allowed = f"{low[number]:g} to {high[number]:g}, the bounds of the environment"
            hint = "scale the actions in the file to the bounds"
            problems.append(Problem(FILE, message, value=str(path), allowed=allowed, hint=hint))
    else:
        chosen = actions - np.asarray(spaces.action_start)
        if (chosen < 0).any() or (chosen >= np.asarray(spaces.action.counts)).any() or (chosen % 1 != 0).any():
            message = f"its actions are between {actions.min():g} and {actions.max():g}"
            allowed = "the choices of the environment, as whole numbers"
            problems.append(Problem(FILE, message, value=str(path), allowed=allowed))
    for name, numbers in (("observations", observations), ("actions", actions)):
        if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
            problems.append(Problem(FILE, f"its {name} have numbers that are not finite", value=str(path)))
    return problems


def _hdf5(path: Path, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    try:
        import h5py
    except ImportError as error:
        raise _not_installed("h5py", path) from error

    try:
        with h5py.File(path, "r") as file:
            if "data" not in file or not len(file["data"]):
                raise ConfigError([Problem(FILE, "it has no episodes below `data`", value=str(path))])
            in_order = sorted(file["data"], key=lambda name: (len(name), name))  # demo_2 before demo_10
            episodes = [file["data"][name] for name in in_order]
            first = episodes[0]
            if missing := [name for name in ("obs", "actions") if name not in first]:
                message = f"{first.name} has no {' and no '.join(missing)}"
                raise ConfigError([Problem(FILE, message, value=str(path), allowed="obs and actions")])
            bare = isinstance(first["obs"], h5py.Dataset)
            chosen = _chosen(["obs"] if bare else list(first["obs"]), names, path)
            steps = [_steps(each, chosen if bare else [f"obs/{name}" for name in chosen], path) for each in episodes]
            observations, actions = zip(*steps, strict=True)
            return np.concatenate(observations), np.concatenate(actions), len(episodes)
    except ConfigError:
        raise
    except Exception as error:  # h5py and NumPy raise various types
        raise _unreadable(path, error) from error


def _steps(episode: h5py.Group, names: Sequence[str], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the observations [T,D] and actions [T,A] of an episode. Raises ConfigError if their numbers differ."""
    lengths = {name: len(episode[name]) for name in (*names, "actions")}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        message, allowed = f"{episode.name} has parts of different lengths: {counts}", "one observation for each action"
        hint = "leave out the observation that follows the last action" if _one_more(lengths) else ""
        raise ConfigError([Problem(FILE, message, value=str(path), allowed=allowed, hint=hint)])
    return _joined([episode[name][()] for name in names]), _joined([episode["actions"][()]])


def _one_more(lengths: dict[str, int]) -> bool:
    return {length - lengths["actions"] for name, length in lengths.items() if name != "actions"} == {1}


def _lerobot(path: Path, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise _not_installed("pyarrow", path) from error

    try:
        info = json.loads(read_regular(path / "meta" / "info.json", LARGEST_INFO))
        features, frames, episodes = info["features"], int(info["total_frames"]), int(info["total_episodes"])
        numbers = [
            name
            for name, feature in features.items()
            if name.startswith("observation.") and feature["dtype"] not in ("image", "video", "string")
        ]
        chosen = _chosen(numbers, names or (["observation.state"] if "observation.state" in numbers else []), path)
        files = sorted((path / "data").rglob("*.parquet"))
        tables = [pyarrow.parquet.read_table(file, columns=[*chosen, "action"]) for file in files]
        rows = sum(table.num_rows for table in tables)
        if rows != frames:
            message = f"{rows} steps are in its {len(files)} files below data/, and meta/info.json counts {frames}"
            raise ConfigError([Problem(FILE, message, value=str(path), hint="download it again")])
        observations = [_joined([_column(table, name) for name in chosen]) for table in tables]
        actions = [_joined([_column(table, "action")]) for table in tables]
        return np.concatenate(observations), np.concatenate(actions), episodes
    except ConfigError:
        raise
    except Exception as error:  # pyarrow raises various types
        raise _unreadable(path, error) from error


def _chosen(there: Sequence[str], names: Sequence[str], path: Path) -> Sequence[str]:
    """Returns the parts of an observation. Raises ConfigError if one is missing, or if none is named of several."""
    if unknown := [name for name in names if name not in there]:
        message, listed = f"it has no observations {', '.join(unknown)}", ", ".join(there)
        raise ConfigError([Problem(NAMES, message, value=str(path), allowed=listed)])
    if not names and len(there) != 1:
        message = f"it has {len(there)} kinds of observations, whose order in the policy's input is not known"
        hint = f"{KEY}.observations=[{','.join(there)}]"
        raise ConfigError([Problem(NAMES, message, value=str(path), allowed=", ".join(there), hint=hint)])
    return names or there


def _column(table: pyarrow.Table, name: str) -> np.ndarray:
    """Returns a column of numbers or of lists of equal length."""
    rows = table.column(name).to_numpy(zero_copy_only=False)
    return np.stack(list(rows)) if rows.dtype == object else rows


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns parts [T,...] side by side: [T,sum of their sizes] float32. Numbers too large become infinite."""
    with np.errstate(over="ignore"):
        numbers = [np.asarray(part).astype(np.float32) for part in parts]
    return np.concatenate([part.reshape(len(part), math.prod(part.shape[1:])) for part in numbers], axis=1)


def _not_installed(package: str, path: Path) -> ConfigError:
    message, hint = f"{package} is not installed", "pip install 'rl-platform[demonstrations]'"
    return ConfigError([Problem(FILE, message, value=str(path), hint=hint)])


def _unreadable(path: Path, error: Exception) -> ConfigError:
    allowed = "data/EPISODE/obs and actions in HDF5, or meta/info.json and data/*.parquet of LeRobot"
    message = f"it cannot be read ({type(error).__name__}: {error})"
    return ConfigError([Problem(FILE, message, value=str(path), allowed=allowed)])
