"""Questions with expected answers, split into training and validation.

Not covered: encoding questions (`prompts.py`) and scoring responses (`verifiers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_platform.records import Message

SOURCE_COLUMN = "source_column"  # in the metadata: the column `source` of the data, where `source` is the label


@dataclass(frozen=True)
class Question:
    """One task instance: the question, the expected answer, and further data for the verifier.

    messages: the prompt as a conversation, of which `text` is the transcript; empty: `text` is the prompt. source: the
    label of its source in `data.sources`, also in the metadata. where: its place in the data, for messages.
    """

    text: str
    answer: str
    metadata: dict[str, object] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    source: str = ""
    where: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """The text without case and extra white space. Questions with equal keys are the same question."""
        return " ".join(self.text.casefold().split())


@dataclass(frozen=True)
class Split:
    """Disjoint training and validation questions. unused: rows of a validation file beyond data.val_size. repeated:
    training questions that were removed, because they are also validation questions."""

    train: list[Question]
    validation: list[Question]
    unused: int = 0
    repeated: int = 0
