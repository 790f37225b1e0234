"""A trained embodied policy as a folder: `policy.json` describes it, `policy.safetensors` holds its weights.

The two files are enough to act with the policy: neither a checkpoint nor the environment is read. Nothing in them is
code. Not covered: reading them, see `launch/saved/policy_folder.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import EnvSpaces

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rl_platform.models.embodied_policy import EmbodiedPolicy

DESCRIPTION, WEIGHTS = "policy.json", "policy.safetensors"


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
    """A policy that can be written. weights: its parameters, adapters merged, on the CPU."""

    description: PolicyDescription
    weights: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Writes both files into an existing folder."""
        text = self.description.model_dump_json(indent=1)
        (folder / DESCRIPTION).write_text(f"{text}\n", encoding="utf-8")
        weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self.weights.items()}
        (folder / WEIGHTS).write_bytes(save(weights))  # `save_file` would make it readable for the user only


def language_of(policy: EmbodiedPolicy) -> Language | None:
    """Returns the description of the policy's language model; None if it has none."""
    config: PretrainedConfig | None = getattr(policy, "language_config", None)
    if config is None:
        return None
    options = json.loads(config.to_json_string(use_diff=False))
    tokens = getattr(policy, "instruction_tokens", [])
    return Language(config=options, instruction_lengths=cast(list[int], policy.lengths), instruction_tokens=tokens)
