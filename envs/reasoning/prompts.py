"""Encodes questions as prompts, and loads prompts in training order.

Not covered: building questions (`tasks.py`) and grouping samples of a prompt (the rollout component).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.question import Question
from rl_platform.errors import CheckpointError, ConfigError, Problem
from rl_platform.records import Prompt

PLACEHOLDER = "{question}"


class PromptEncoder(Protocol):
    """The part of a tokenizer that prompts need; `models.tokenizer.Tokenizer` has it."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their questions, without the `too_long` ones that exceed data.max_prompt_length."""

    prompts: list[Prompt]
    too_long: int


def build_prompts(questions: Sequence[Question], tokenizer: PromptEncoder, data: Data) -> PromptSet:
    """Encodes each question in template and chat turns. `Prompt.index` is the position in `questions`.

    Raises ConfigError for a template without {question}, settings without effect, a tokenizer without a chat template,
    and if no prompt is short enough.
    """
    _check_template(data)
    encoded = [tuple(_encode(question.text, tokenizer, data)) for question in questions]
    prompts = [
        Prompt(index, question.text, question.answer, token_ids, question.metadata)
        for index, (question, token_ids) in enumerate(zip(questions, encoded, strict=True))
        if len(token_ids) <= data.max_prompt_length
    ]
    if not prompts:
        shortest = min(map(len, encoded), default=0)
        message = f"not one of {len(encoded)} prompts is that short; the shortest has {shortest} tokens"
        raise ConfigError([Problem("data.max_prompt_length", message, value=str(data.max_prompt_length))])
    return PromptSet(prompts, too_long=len(encoded) - len(prompts))


def _check_template(data: Data) -> None:
    problems = []
    if PLACEHOLDER not in data.prompt_template:
        message = "without {question} every prompt would be the same"
        problems.append(Problem("data.prompt_template", message, value=repr(data.prompt_template)))
    if data.system_prompt is not None and not data.use_chat_template:
        message = "has no effect without a chat template"
        hint = "remove it, or set data.use_chat_template: true"
        problems.append(Problem("data.system_prompt", message, value=repr(data.system_prompt), hint=hint))
    if problems:
        raise ConfigError(problems)


def _encode(question: str, tokenizer: PromptEncoder, data: Data) -> list[int]:
    text = data.prompt_template.replace(PLACEHOLDER, question)
    if not data.use_chat_template:
        return tokenizer.encode(text)
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return tokenizer.apply_chat([*system, {"role": "user", "content": text}])


class PromptLoader:
    """Yields endless batches of training prompts in a new seeded order every epoch. A batch may span two epochs.

    The order depends only on seed and epoch, so (epoch, position) is the full state and resuming is exact.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int, shuffle: bool = True) -> None:
        self._prompts = prompts
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """Completed passes over the prompts."""
        return self._epoch

    def left(self, epochs: int) -> int:
        """Returns the number of prompts until `epochs` passes are complete; 0 after them."""
        return max(0, (epochs - self._epoch) * len(self._prompts) - self._position)

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """Returns the next `size` prompts; None: `batch_size`."""
        count = self._batch_size if size is None else size
        batch: list[Prompt] = []
        while len(batch) < count:
            taken = self._order[self._position : self._position + count - len(batch)]
            batch += [self._prompts[index] for index in taken]
            self._position += len(taken)
            if self._position == len(self._prompts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
        return batch

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "prompts": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises CheckpointError if it is of other prompts or another seed."""
        for name, own in (("prompts", self._fingerprint), ("seed", self._seed)):
            if state[name] != own:
                raise CheckpointError(
                    f"the checkpoint's data position is of other {name} ({state[name]}, now {own}): "
                    "resume with the data and runner.seed it was made with, or start anew with runner.resume: never."
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._prompts)).tolist()


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' tokens and their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes() + b"|")
    return f"{len(prompts)}-{digest.hexdigest()[:16]}"
