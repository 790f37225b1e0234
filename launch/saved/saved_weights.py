"""The weights in a checkpoint of a learner, under the names that the learner publishes, without its engine."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from rl_platform.config.schema.models import Lora
from rl_platform.engines.training.state_files import read_whole
from rl_platform.errors import CheckpointError
from rl_platform.models.adapters.lora import merged


def trained_weights(folder: str | Path) -> dict[str, Tensor]:
    """Returns the trained weights in the folder of a learner's state. Any engine and number of ranks may have saved it.

    Frozen weights and the second name of a tied one are missing. Raises CheckpointError if a file cannot be read.
    """
    return {name.removeprefix("model.model."): tensor for name, tensor in read_whole(folder, "model.").items()}


def whole_weights(folder: str | Path, model: nn.Module, lora: Lora | None) -> dict[str, Tensor]:
    """Returns all weights of `model`, which gets those of `trained_weights`. Adapters are merged into their matrices.

    Raises CheckpointError if they are of another model.
    """
    own, saved = model.state_dict(keep_vars=True), trained_weights(folder)
    filled = {id(own[name]) for name in saved if name in own}  # a tied weight has two names and is saved once
    missing = [name for name, tensor in own.items() if tensor.requires_grad and id(tensor) not in filled]
    if wrong := missing or [*(saved.keys() - own.keys())]:
        raise CheckpointError(f"{folder} is of another model: {wrong[0]} is {'missing' if missing else 'unknown'}")
    try:
        model.load_state_dict(saved, strict=False)
    except RuntimeError as error:  # another shape
        raise CheckpointError(f"{folder} is of another model: {' '.join(str(error).split())}") from error
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return weights if lora is None else merged(weights, lora)
