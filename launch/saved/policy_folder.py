"""Reads the folder of a trained embodied policy, and builds the policy. Nothing runs code of the folder.

Not covered: acting, see `components/policy_rollout.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from rl_platform.disk import read_regular
from rl_platform.envs.embodied.normalize import ObservationNormalizer
from rl_platform.errors import DataError
from rl_platform.models.embodied_policy import build_policy
from rl_platform.models.saved_policy import DESCRIPTION, WEIGHTS, PolicyDescription, SavedPolicy
from rl_platform.user_code import is_imported, is_named

if TYPE_CHECKING:
    from rl_platform.models.embodied_policy import EmbodiedPolicy

LARGEST_DESCRIPTION = 64 << 20  # bytes; the statistics of a million observed numbers take less


def read_policy(folder: Path) -> SavedPolicy:
    """Reads a folder that `SavedPolicy.write` has written. Raises DataError for files that it has not."""
    try:
        description = PolicyDescription.model_validate_json(read_regular(folder / DESCRIPTION, LARGEST_DESCRIPTION))
        _refuse_code(description.model.type, folder)
        # copies, whose memory is aligned as that of a checkpoint's: in the file, products may round differently
        weights = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        return SavedPolicy(description, weights)
    except ValidationError as error:
        each = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in error.errors())
        wrong = "; ".join(each)
        raise DataError(f"{folder / DESCRIPTION} describes no policy of this version: {wrong}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"the policy in {folder} cannot be read: {error}") from error


def built(saved: SavedPolicy) -> EmbodiedPolicy:
    """Returns the policy, on the CPU. Raises DataError for weights of another architecture."""
    with torch.random.fork_rng(devices=[]):
        policy = _empty(saved)
    try:
        policy.load_state_dict(saved.weights, assign=True)
    except RuntimeError as error:
        raise DataError(f"{WEIGHTS} does not fit {DESCRIPTION}: {' '.join(str(error).split())}") from error
    return policy.requires_grad_(False).eval()


def _empty(saved: SavedPolicy) -> EmbodiedPolicy:
    """Returns the policy before its weights are loaded."""
    about, language = saved.description, saved.description.language
    if language is None:
        return build_policy(about.model, about.spaces, about.levels, about.seed)
    if about.model.type == "vla":
        from rl_platform.models.policies.vla import policy_without_weights

        return policy_without_weights(about.model, about.spaces, language.config, language.instruction_lengths)
    from rl_platform.models.vlas.build import without_weights

    tokens = language.instruction_tokens
    return without_weights(about.model, about.spaces, about.levels, language.config, tokens)


def normalizer_of(saved: SavedPolicy) -> ObservationNormalizer | None:
    """Returns the observation normaliser with its saved statistics; None if the policy observes raw numbers."""
    known = saved.description.normalizer
    if known is None:
        return None
    normalizer = ObservationNormalizer((saved.description.spaces.observation_size,), known.clip)
    normalizer.load_state_dict(known.model_dump(exclude={"clip"}))
    return normalizer


def _refuse_code(network: str, folder: Path) -> None:
    """Raises DataError for a network of the user that is not imported yet: reading a folder runs no code."""
    module = network.rpartition(":")[0]
    if is_named(network) and not is_imported(module):
        hint = f"import it first, if you trust it: rl_platform.user_code.import_user_module({module!r})"
        raise DataError(f"the policy in {folder} has a network of code, {network}: {hint}")
