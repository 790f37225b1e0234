"""Verifiers: functions from a `ScoreItem` to a score, built by name inside the scoring processes.

Built-in scores are in [0, 1]. A response that is wrong or cannot be parsed scores 0. A verifier raises only if it
cannot score, such as for an expected answer that it cannot parse; training then leaves the sample out. Every scoring
process imports this module, so it must not import torch or pydantic. Not covered: timeouts and processes, see
`scoring.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

from rl_platform.extras import find
from rl_platform.user_code import Extension

BUILT_IN = ("task", "math_verify", "exact_match")
MATHEMATICS = ("jsonl", "file", "dataset")  # types of tasks whose answers are compared as numbers and formulas
DECIDING = (*BUILT_IN, "code")  # types of reward whose full score means that the response is right


@dataclass(frozen=True)
class ScoreItem:
    """A response and the fields of its question. last_turn: the policy's last turn; None if there is only one.
    messages: the prompt as a chat, if it is one."""

    response: str
    question: str
    answer: str
    metadata: dict[str, object] = field(default_factory=dict)
    last_turn: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    @property
    def final(self) -> str:
        """The text that built-in verifiers read: the policy's last turn. `response` also has the answers of tools."""
        return self.response if self.last_turn is None else self.last_turn


# A score, or a score and rewards of steps: (number of characters up to the end of the step, reward).
Verdict = float | tuple[float, Sequence[tuple[int, float]]]
Verifier = Callable[[ScoreItem], Verdict]


class RewardFunction(Protocol):
    """The user's reward of a response."""

    def __call__(self, response: str, answer: str, metadata: dict[str, object], /) -> Verdict:
        """Returns the score, or the score and the rewards of steps. answer, metadata: of the question."""


REWARD = Extension(
    "reward",
    "reward.type",
    RewardFunction,
    "function(response, answer, metadata) -> float, or (float, [(end of a step, its reward)])",
)


@dataclass(frozen=True)
class VerifierSpec:
    """The name of a verifier, `reward.type`, and for `task` the type, name and params of `data.task`, or the specs of
    `data.sources` by label. exact: of a reasoning-gym task, see `GymVerifier`."""

    type: str
    task_type: str = ""
    task_name: str | None = None
    task_params: dict[str, object] = field(default_factory=dict)
    sources: dict[str, VerifierSpec] = field(default_factory=dict)
    exact: bool = True

    @property
    def key(self) -> str:
        return REWARD.key

    @property
    def built_in(self) -> bool:
        return self.type in BUILT_IN

    @property
    def evaluates(self) -> bool:
        """Whether it is built in and evaluates text of the model: formulas, or answers of reasoning-gym."""
        tasks = self.sources.values() if self.sources else [self]
        known = (*MATHEMATICS, "reasoning_gym")
        return self.type == "math_verify" or (self.type == "task" and any(task.task_type in known for task in tasks))

    def load(self) -> Verifier:
        """Returns the verifier. Raises ConfigError for a function that cannot be imported."""
        if self.type == "exact_match":
            return exact_match
        if self.type == "math_verify":
            return _math_verifier()
        return _task_verifier(self) if self.type == "task" else _user_verifier(self.type)


def exact_match(item: ScoreItem) -> float:
    """Returns 1 if response and answer are equal up to surrounding white space, else 0."""
    return float(item.final.strip() == item.answer.strip())


def match_digit(item: ScoreItem) -> float:
    """Returns 1 if the response starts with the answer, 0.1 if it starts with another digit, else 0.

    The reward of 0.1 makes the task learnable from random bytes.
    """
    first = item.final[:1]
    return 1.0 if first == item.answer else 0.1 if first and first in "0123456789" else 0.0


def match_quotient(item: ScoreItem) -> float:
    """Returns `match_digit` of the last turn, at least 0.05, if the first turn called the calculator; else 0.

    The 0.05 makes the call learnable from random bytes. A last turn that calls the calculator again scores 0.
    """
    if item.last_turn is None or not item.response.startswith("=") or item.last_turn.startswith("="):
        return 0.0
    return max(0.05, match_digit(item))


def _task_verifier(spec: VerifierSpec) -> Verifier:
    if spec.sources:
        verifiers = {label: _task_verifier(source) for label, source in spec.sources.items()}
        return lambda item: verifiers[str(item.metadata["source"])](item)
    if spec.task_type in MATHEMATICS:
        return _math_verifier()
    if spec.task_type != "reasoning_gym":
        return match_quotient if spec.task_params.get("operation") == "quotient" else match_digit
    from rl_platform.envs.reasoning.answers.gym_verifier import GymVerifier

    gym = GymVerifier(spec.task_name, spec.task_params, spec.exact)
    return lambda item: gym.score(item.final, item.question, item.answer, item.metadata)


def _math_verifier() -> Verifier:
    """Compares numbers, words, sets and so on by their type, formulas by math-verify."""
    import math_verify  # imported before the process reports that it is ready

    from rl_platform.envs.reasoning.answers import comparing

    # It would warn that its timeouts, which use signals, are off. The scoring pool has its own timeouts.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    comparing.warm_up()
    return lambda item: float(comparing.matches(item.final, item.answer, item.question))


def _user_verifier(name: str) -> Verifier:
    kind = find("rl_platform.config.explanations", "foreign_rewards.of_rewards", lambda kind: kind)(REWARD)
    function = kind.load(name)
    # of its own: responses to one question that arrive together share the metadata, which the function may change
    return lambda item: function(item.response, item.answer, deepcopy(item.metadata))
