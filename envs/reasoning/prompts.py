"""Encodes questions as prompts, and loads prompts in training order.

Not covered: building questions (`tasks.py`) and grouping samples of a prompt (the rollout component).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.question import SOURCE_COLUMN, Question, Split
from rl_platform.errors import CheckpointError, ConfigError, DataError, Problem
from rl_platform.records import Message, Prompt, StateDict

logger = logging.getLogger(__name__)
PLACEHOLDER = "{question}"
IMAGE_COLUMNS = ("images", "image", "videos", "video")  # names in data sets of vision-language models


class PromptEncoder(Protocol):
    """The part of a tokenizer that prompts need; `models.tokenizer.Tokenizer` has it."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their questions, without the `too_long` ones that exceed data.max_prompt_length."""

    prompts: list[Prompt]
    too_long: int


def build_prompts(
    questions: Sequence[Question],
    tokenizer: PromptEncoder,
    data: Data,
    with_tools: Callable[[Sequence[Message]], int] | None = None,
) -> PromptSet:
    """Encodes each question in template and chat turns, and message lists as they are. `Prompt.index` is the position
    in `questions`.

    with_tools: returns the number of tokens of a conversation and the description of the tools of `rollout.agent`,
    which data.max_prompt_length then counts.

    Raises ConfigError for settings without effect on messages, a tokenizer without a chat template, and if no prompt is
    short enough; DataError for messages that the chat template refuses.
    """
    _check_template(data, questions)
    encoded = [tuple(_encode(question, tokenizer, data)) for question in questions]
    lengths = [
        len(token_ids) if with_tools is None else with_tools(question.messages or messages_of(question.text, data))
        for question, token_ids in zip(questions, encoded, strict=True)
    ]
    prompts = [
        Prompt(index, question.text, question.answer, token_ids, question.metadata, question.messages, question.source)
        for index, (question, token_ids) in enumerate(zip(questions, encoded, strict=True))
        if lengths[index] <= data.max_prompt_length
    ]
    problems = []
    for source in {question.source for question in questions} - {prompt.source for prompt in prompts}:
        own = [
            (length, question.where)
            for question, length in zip(questions, lengths, strict=True)
            if question.source == source
        ]
        of = f" of source {source}" if source else ""
        shortest, where = min(own)
        at = f" ({where})" if where else ""
        described = "" if with_tools is None else " with the description of the tools"
        message = f"not one of {len(own)} prompts{of} is that short; the shortest has {shortest} tokens{described}{at}"
        hint = f"data.max_prompt_length={max(own)[0]} keeps all of them"
        problems.append(Problem("data.max_prompt_length", message, value=str(data.max_prompt_length), hint=hint))
    if problems:
        raise ConfigError(problems)
    return PromptSet(prompts, too_long=len(encoded) - len(prompts))


def notes_on(questions: Split, train: PromptSet, validation: PromptSet) -> list[str]:
    """Returns a note for the user about each kind of question that the run does not use, and about columns with another
    name in the metadata."""
    notes = [
        f"{count} {what} prompts are longer than data.max_prompt_length and were left out"
        for what, count in (("training", train.too_long), ("validation", validation.too_long))
        if count
    ]
    if questions.repeated:
        equal = "training questions equal a validation question, up to case and spacing,"
        notes.append(f"{questions.repeated} {equal} and were left out")
    if questions.unused:
        used, rows = len(questions.validation), questions.unused
        notes.append(f"validation uses {used} questions and leaves out {rows} more of its files: data.val_size")
    if contradicted := _contradicted(questions.train):
        count, example = len(contradicted), json.dumps(contradicted[0][:60], ensure_ascii=False)
        notes.append(f"{count} training questions occur again with another answer, the first is {example}")
    if pictured := [name for name in IMAGE_COLUMNS if any(question.metadata.get(name) for question in questions.train)]:
        what = f"the column {pictured[0]} of the questions is not part of any prompt: reasoning models read text only"
        notes.append(what)
    if renamed := sum(SOURCE_COLUMN in question.metadata for question in [*questions.train, *questions.validation]):
        label = 'metadata["source"] is the label of data.sources'
        notes.append(
            f"{renamed} questions have a column 'source': {label}, the column is metadata[\"{SOURCE_COLUMN}\"]"
        )
    return notes


def _contradicted(questions: Sequence[Question]) -> list[str]:
    """Returns the questions of files that occur again with another answer, which is wrong for one of the two."""
    stored = [question for question in questions if question.where]
    answers: dict[str, str] = {}
    return list(
        dict.fromkeys(each.text for each in stored if answers.setdefault(each.text, each.answer) != each.answer)
    )


def _check_template(data: Data, questions: Sequence[Question]) -> None:
    problems = []
    chats = sum(bool(question.messages) for question in questions)
    if chats and not data.use_chat_template:
        message = f"{chats} prompts are lists of messages, which only a chat template renders"
        problems.append(Problem("data.use_chat_template", message, value="false", hint="true, or prompts of text"))
    if chats == len(questions) and chats:
        message = "has no effect: every prompt is a list of messages, which is rendered as it is"
        for key, value, default in (
            ("system_prompt", data.system_prompt, None),
            ("prompt_template", data.prompt_template, PLACEHOLDER),
        ):
            if value != default:
                problems.append(
                    Problem(f"data.{key}", message, value=repr(value), hint="put the text into the messages")
                )
    if problems:
        raise ConfigError(problems)


def _encode(question: Question, tokenizer: PromptEncoder, data: Data) -> list[int]:
    if question.messages:
        try:
            return tokenizer.apply_chat(question.messages)
        except ValueError as error:
            raise DataError(f"{question.where}: the messages cannot be rendered: {error}.") from error
    if not data.use_chat_template:
        return tokenizer.encode(data.prompt_template.replace(PLACEHOLDER, question.text))
    messages = messages_of(question.text, data)
    try:
        return tokenizer.apply_chat(messages)
    except ValueError as error:
        key, value = ("system_prompt", data.system_prompt) if len(messages) > 1 else ("use_chat_template", "true")
        raise ConfigError([Problem(f"data.{key}", str(error), value=repr(value))]) from error


def messages_of(text: str, data: Data) -> list[Message]:
    """Returns the question `text` as a conversation: `data.system_prompt` and `data.prompt_template`."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    return [*system, {"role": "user", "content": data.prompt_template.replace(PLACEHOLDER, text)}]


class PromptLoader:
    """Yields endless batches of training prompts. Each source has a new seeded order in every pass over its prompts.

    weights: of the sources, by label; one prompt after the other comes from the source that is furthest behind its
    share, so any n consecutive prompts have the shares of the weights, up to rounding. The order depends only on seed
    and weights, so the number of prompts drawn from each source is the full state and resuming is exact.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._weights = dict(weights) if weights else {"": 1.0}
        self._prompts: dict[str, list[Prompt]] = {source: [] for source in self._weights}
        for prompt in prompts:
            self._prompts[prompt.source].append(prompt)
        self._count, self._fingerprint, self._answers = len(prompts), _fingerprint(prompts), _answers(prompts)
        self._drawn = dict.fromkeys(self._weights, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}  # by source: a pass and its order

    @property
    def epoch(self) -> int:
        """Completed epochs. An epoch has as many prompts as all sources together."""
        return sum(self._drawn.values()) // self._count

    def left(self, epochs: int) -> int:
        """Returns the number of prompts until `epochs` epochs are complete; 0 after them."""
        return max(0, epochs * self._count - sum(self._drawn.values()))

    def next_batch(self, size: int | None = None) -> list[Prompt]:
        """Returns the next `size` prompts; None: `batch_size`."""
        return [self._next() for _ in range(self._batch_size if size is None else size)]

    def state_dict(self) -> StateDict:
        state = {"drawn": dict(self._drawn), "weights": dict(self._weights)}
        data = {"seed": self._seed, "shuffle": self._shuffle, "prompts": self._fingerprint, "answers": self._answers}
        return state | data

    def load_state_dict(self, state: StateDict) -> None:
        """Continues from `state`. Raises CheckpointError if it is of other prompts, another order or other weights.

        Other answers are a warning, as another reward is: the position in the data stays valid.
        """
        pairs = (
            ("prompts", state["prompts"], self._fingerprint),
            ("seed", state["seed"], self._seed),
            ("shuffle", state.get("shuffle", self._shuffle), self._shuffle),  # older checkpoints do not have it
            ("weights", state["weights"], self._weights),
        )
        for name, saved, own in pairs:
            if saved != own:
                raise CheckpointError(
                    f"the checkpoint's data position is of other {name} ({saved}, now {own}): "
                    "resume with the data, data.shuffle and runner.seed it was made with, or start anew in another "
                    "runner.output_dir."
                )
        if state.get("answers", self._answers) != self._answers:
            logger.warning(
                "the expected answers of the training data differ from those of the checkpoint: rewards before and "
                "after this step measure different things"
            )
        self._drawn = dict(state["drawn"])

    def _next(self) -> Prompt:
        # the n-th prompt of a source with weight w is due at time (n + 1/2) / w
        source = min(self._weights, key=lambda name: (self._drawn[name] + 0.5) / self._weights[name])
        prompts = self._prompts[source]
        number, position = divmod(self._drawn[source], len(prompts))
        if self._orders.get(source, (-1, []))[0] != number:
            self._orders[source] = number, self._order(source, number)
        self._drawn[source] += 1
        return prompts[self._orders[source][1][position]]

    def _order(self, source: str, number: int) -> list[int]:
        """Returns the order of a source's prompts in the pass `number`."""
        count = len(self._prompts[source])
        if not self._shuffle:
            return list(range(count))
        stream = list(self._weights).index(source)
        order: list[int] = np.random.default_rng([self._seed, number, stream]).permutation(count).tolist()
        return order


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of the prompts' tokens and their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes() + b"|")
    return f"{len(prompts)}-{digest.hexdigest()[:16]}"


def _answers(prompts: Sequence[Prompt]) -> str:
    """Returns a hash of the expected answers and their order."""
    return hashlib.sha256("\0".join(prompt.answer for prompt in prompts).encode(errors="surrogatepass")).hexdigest()[
        :16
    ]
