"""What a task is made of: questions with their expected answers, split into training and validation.

Turning questions into token ids is in `prompts.py`, scoring responses in `verifiers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    """One task instance as text: what is asked, what the verifier compares to, and plain data it needs besides."""

    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Two questions with the same key are the same question: case and white space do not count."""
        return " ".join(self.text.casefold().split())


@dataclass(frozen=True)
class Split:
    """Training and validation questions without a common one; `removed` is how many left training for that."""

    train: list[Question]
    validation: list[Question]
    removed: int = 0
