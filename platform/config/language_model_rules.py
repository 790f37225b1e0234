"""Rules of a section that names a language model, whoever it is for."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema.models import Model

_TASK = "runner.task_type"


def broken_language_model_rules(path: str, model: Model) -> Iterator[BrokenRule]:
    """The rules that the section at `path` breaks."""
    if (model.path is None) == (model.random_init is None):
        found = "neither is set" if model.path is None else "both are set"
        message = f"a language model comes from path or from random_init: {found}"
        yield BrokenRule(path, message, (f"{path}.path", f"{path}.random_init", _TASK), f"as {path}.path: FOLDER")
    if (random := model.random_init) is None:
        return
    inside = f"{path}.random_init"
    if model.tokenizer is None:
        message = "a random model has no tokenizer of its own"
        yield BrokenRule(f"{path}.tokenizer", message, (inside, _TASK), f"{path}.tokenizer: bytes")
    if random.hidden_size % random.num_heads:
        message = f"the heads do not divide hidden_size {random.hidden_size}"
        yield BrokenRule(f"{inside}.num_heads", message, (f"{inside}.hidden_size", _TASK))
    if random.num_kv_heads is not None and random.num_heads % random.num_kv_heads:
        message = f"each key-value head serves equally many of the {random.num_heads} heads (num_heads)"
        yield BrokenRule(f"{inside}.num_kv_heads", message, (f"{inside}.num_heads", _TASK))
