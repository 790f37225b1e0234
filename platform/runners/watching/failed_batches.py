"""Mini-batches whose gradient was not finite, as files of the run's output folder."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.records import RolloutBatch

logger = logging.getLogger(__name__)

FOLDER = "failures"  # of the run's output folder
MOST_KEPT = 10  # files of a run: the first ones are the most useful, and the disk must not fill up


def keep_failed_batch(batch: RolloutBatch, config: Config, kind: str, step: int, epoch: int) -> Path | None:
    """Writes `batch` to failures/step-00000012-actor-0.pt and says so; None: there are enough, or it cannot be written.

    `torch.load` reads it: the fields of `RolloutBatch` by name, its inputs as `inputs.<name>`. `step` counts from 0,
    the file's name from 1, as metrics do.
    """
    folder = Path(config.runner.output_dir).absolute() / FOLDER
    path = folder / f"step-{step + 1:08d}-{kind}-{epoch}.pt"
    try:
        folder.mkdir(exist_ok=True)  # an output folder that was moved is not created again
        if not path.exists() and len(list(folder.iterdir())) >= MOST_KEPT:
            return None
        torch.save(_tensors(batch), path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk; the run continues
        logger.warning("a mini-batch with a non-finite gradient could not be written to %s: %s", path, error)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    logger.warning(
        "%s: the gradient of a mini-batch was not finite; its step was left out, its rows are in %s", kind, path
    )
    return path


def _tensors(batch: RolloutBatch) -> dict[str, Tensor]:
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    fields |= {f"inputs.{name}": value for name, value in batch.inputs.items()}
    return {name: tensor.clone() for name, tensor in fields.items()}  # torch.save writes the whole storage of a view
