"""Reads the rows of Hugging Face datasets: folders on disk and ids of the hub. Needs the package `datasets`.

Not covered: the meaning of the columns (`rows.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.envs.reasoning.sources.tables import Row, plain
from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.hub_access import prepare_loading

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = ".parquet, .json, .jsonl, .csv, .txt or .arrow"  # the questions that load_dataset reads
SAVED = ("state.json", "dataset_dict.json")  # files of a folder written by save_to_disk: one dataset, several splits


def dataset_rows(path: str, name: str | None, split: str | None) -> list[Row]:
    """Returns the rows of a split. path: a folder written by `save_to_disk`, another folder that `load_dataset` reads,
    or an id of the hub. name: a config of the dataset. split: None is `train`, or all of a folder without splits.

    Raises ConfigError without the package, DataError if nothing can be loaded.
    """
    prepare_loading(path)
    try:
        import datasets
    except ModuleNotFoundError as error:
        hint = "pip install -c constraints/cpu.txt -e '.[data]'"
        message = "a Hugging Face dataset is read by the package datasets, which is not installed"
        raise ConfigError([Problem("data.task.type", message, value="dataset", hint=hint)]) from error

    datasets.disable_progress_bars()
    saved = any((Path(path) / file).is_file() for file in SAVED)
    try:
        rows = _saved(path, split) if saved else datasets.load_dataset(path, name, split=split or "train")
        place = f"{path} [{split or 'train'}]"
        return [(f"{place}, row {number}", plain(row)) for number, row in enumerate(rows.to_list(), 1)]
    except DataError:
        raise
    except Exception as error:  # the package documents no common base class, and passes on those of its transports
        hint = (
            f"A folder holds files of one kind, {KINDS}, or what datasets.load_dataset(...).save_to_disk(FOLDER) wrote"
            if Path(path).is_dir()
            else "If it is no folder on this machine, it is an id of the Hugging Face hub, which needs a network: "
            "prepare a folder where there is one, with datasets.load_dataset(...).save_to_disk(FOLDER)"
        )
        raise DataError(f"{path}: cannot be loaded: {_reason(error)}. {hint}.") from error


def _reason(error: BaseException) -> str:
    """Returns type and first line of the error, and those of its first cause: the package wraps parsers' errors."""
    first = error
    while (before := first.__cause__) is not None:
        first = before
    reasons = [f"{type(each).__name__}: {(str(each).splitlines() or [''])[0].rstrip('.')}" for each in (error, first)]
    return ", caused by ".join(dict.fromkeys(reasons))


def _saved(path: str, split: str | None) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(path)
    if not isinstance(loaded, DatasetDict):
        if split is not None:
            raise DataError(f"{path}: holds one dataset without splits, so it has no split {split}: remove the key.")
        return loaded
    if (wanted := split or "train") not in loaded:
        raise DataError(f"{path}: no split {wanted}. Splits there: {', '.join(loaded)}.")
    return loaded[wanted]
