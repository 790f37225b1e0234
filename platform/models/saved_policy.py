"""A trained embodied policy as a folder: `policy.json` describes it, `policy.safetensors` holds its weights.

The two files are enough to act with the policy: neither a checkpoint nor the environment is read. Nothing in them is
code. Not covered: acting, see `components/policy_rollout.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.disk import read_regular
from rl_platform.envs.embodied.normalize import ObservationNormalizer
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import DataError
from rl_platform.models.embodied_policy import build_policy
from rl_platform.user_code import is_imported, is_named

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rl_platform.models.embodied_policy import EmbodiedPolicy

DESCRIPTION, WEIGHTS = "policy.json", "policy.safetensors"
LARGEST_DESCRIPTION = 64 << 20  # bytes; the statistics of a million observed numbers take less


class Normalizer(BaseModel):
    """Moments [D] of the observations, and the bound of normalised ones. See `ObservationNormalizer`."""

    count: int
    mean: list[float]
    variance: list[float]
    clip: float


class Language(BaseModel):
    """The language model of a vision-language-action policy: its transformers config, and tokens per instruction.

    instruction_tokens: the tokens, of a policy on a vision-language model.
    """

    config: dict[str, object]
    instruction_lengths: list[int]
    instruction_tokens: list[list[int]] = []


class PolicyDescription(BaseModel):
    """policy.json.

    environment: the id, for the reader. seed: of sampled actions, the run's. forward_rows: the most observations of one
    forward pass, `algorithm.rollout_micro_batch_size`.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    format: Literal[1] = 1
    environment: str
    step: int
    seed: int
    model: Model
    spaces: EnvSpaces
    levels: ActionLevels
    normalizer: Normalizer | None
    language: Language | None = None
    forward_rows: int | None = None


@dataclass(frozen=True)
class SavedPolicy:
    """A policy that can be built, written and read. weights: its parameters, adapters merged, on the CPU."""

    description: PolicyDescription
    weights: dict[str, Tensor]

    def build(self) -> EmbodiedPolicy:
        """Returns the policy, on the CPU. Raises DataError for weights of another architecture."""
        with torch.random.fork_rng(devices=[]):
            policy = self._empty()
        try:
            policy.load_state_dict(self.weights, assign=True)
        except RuntimeError as error:
            raise DataError(f"{WEIGHTS} does not fit {DESCRIPTION}: {' '.join(str(error).split())}") from error
        return policy.requires_grad_(False).eval()

    def _empty(self) -> EmbodiedPolicy:
        """Returns the policy before its weights are loaded."""
        about, language = self.description, self.description.language
        if language is None:
            return build_policy(about.model, about.spaces, about.levels, about.seed)
        if about.model.type == "vla":
            from rl_platform.models.policies.vla import policy_without_weights

            return policy_without_weights(about.model, about.spaces, language.config, language.instruction_lengths)
        from rl_platform.models.vlas.build import without_weights

        tokens = language.instruction_tokens
        return without_weights(about.model, about.spaces, about.levels, language.config, tokens)

    def normalizer(self) -> ObservationNormalizer | None:
        """Returns the observation normaliser with its saved statistics; None if the policy observes raw numbers."""
        saved = self.description.normalizer
        if saved is None:
            return None
        normalizer = ObservationNormalizer((self.description.spaces.observation_size,), saved.clip)
        normalizer.load_state_dict(saved.model_dump(exclude={"clip"}))
        return normalizer

    def write(self, folder: Path) -> None:
        """Writes both files into an existing folder."""
        text = self.description.model_dump_json(indent=1)
        (folder / DESCRIPTION).write_text(f"{text}\n", encoding="utf-8")
        weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self.weights.items()}
        (folder / WEIGHTS).write_bytes(save(weights))  # `save_file` would make it readable for the user only

    @classmethod
    def read(cls, folder: Path) -> SavedPolicy:
        """Reads a folder that `write` has written. Raises DataError for files that it has not."""
        try:
            description = PolicyDescription.model_validate_json(read_regular(folder / DESCRIPTION, LARGEST_DESCRIPTION))
            _refuse_code(description.model.type, folder)
            return cls(description, load_file(folder / WEIGHTS))
        except ValidationError as error:
            each = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in error.errors())
            wrong = "; ".join(each)
            raise DataError(f"{folder / DESCRIPTION} describes no policy of this version: {wrong}") from error
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"the policy in {folder} cannot be read: {error}") from error


def _refuse_code(network: str, folder: Path) -> None:
    """Raises DataError for a network of the user that is not imported yet: reading a folder runs no code."""
    module = network.rpartition(":")[0]
    if is_named(network) and not is_imported(module):
        hint = f"import it first, if you trust it: rl_platform.user_code.import_user_module({module!r})"
        raise DataError(f"the policy in {folder} has a network of code, {network}: {hint}")


def language_of(policy: EmbodiedPolicy) -> Language | None:
    """Returns the description of the policy's language model; None if it has none."""
    config: PretrainedConfig | None = getattr(policy, "language_config", None)
    if config is None:
        return None
    options = json.loads(config.to_json_string(use_diff=False))
    tokens = getattr(policy, "instruction_tokens", [])
    return Language(config=options, instruction_lengths=policy.lengths, instruction_tokens=tokens)
