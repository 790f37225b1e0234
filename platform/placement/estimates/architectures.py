"""config.json of known language models by their hub ids, for plans and rehearsals without the model's files.

The values are in `architectures.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Options = dict[str, Any]  # a config.json of Hugging Face
_SIZE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_OTHER_MODELS = re.compile(r"\b(vl|audio|omni|embedding|reranker|coder-480b)\b|qwen3-next")


@dataclass(frozen=True)
class Family:
    """An entry of the table, which explains the fields."""

    pattern: str
    tokenizer: str
    options: Options
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tied: Collection[str] = ()

    def options_of(self, path: str) -> Options | None:
        """Returns config.json of the model `path` of this family; None if its size is not known."""
        if not self.sizes:
            return dict(self.options)
        match = re.search(r"(\d+(?:\.\d+)?)[bm]\b", _name(path))
        size = match[1] if match else ""
        if size not in self.sizes:
            return None
        named = dict(zip(_SIZE_KEYS, self.sizes[size], strict=False))
        return {**self.options, **named, "tie_word_embeddings": size in self.tied}


def family_of(path: str) -> Family | None:
    """Returns the family of a hub id, or of a folder that is named after its model."""
    name = _name(path)
    if _OTHER_MODELS.search(name):  # of another architecture than the family that their names begin with
        return None
    return next((family for family in families() if re.search(family.pattern, name)), None)


def known_options(path: str) -> Options | None:
    """Returns config.json of a hub id, or of a folder that is named after its model; None if the table lacks it."""
    family = family_of(path)
    return None if family is None else family.options_of(path)


@cache
def families() -> tuple[Family, ...]:
    """Returns the table, in the order in which patterns are compared."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(Family(**entry) for entry in table["families"])


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()
