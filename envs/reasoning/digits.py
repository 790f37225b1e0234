"""A toy task with one-digit answers about strings of digits, which a random tiny model learns by reinforcement only.

`data.task.params`: `operation` and `length`, the number of digits (default 4). Operations are `last` (default:
"3142=" -> 2), `max` ("3142=" -> 4) and `quotient` ("43974/7329" -> 6). `last` is the easiest: its answers are balanced
and depend on one token. `quotient` is for turns with a calculator, which the policy calls by a single `=`; its answers
are random. The task is meant for bare prompts and the byte tokenizer. Not covered: scoring, see `verifiers.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from rl_platform.config.schema.data import Data, QuestionTask
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.errors import ConfigError, Problem
from rl_platform.suggest import did_you_mean

QUOTIENT = "quotient"
OPERATIONS: dict[str, Callable[[str], str]] = {"last": lambda digits: digits[-1], "max": max}
DEFAULTS = {"operation": "last", "length": 4}
LONGEST = 9


def digit_questions(data: Data, task: QuestionTask, seed: int) -> Split:
    """Samples distinct questions from all 10**length: `val_size` for validation, `train_size` for training.

    Raises ConfigError for unknown parameters and if there are too few questions.
    """
    operation, length = _parameters(task)
    wanted, existing = data.val_size + data.train_size, 10**length
    if wanted > existing:
        message = f"there are only {existing} questions of {length} digits"
        value = f"train_size {data.train_size} + val_size {data.val_size} = {wanted}"
        hint = "lower the sizes, or raise data.task.params.length"
        raise ConfigError(
            [Problem("data.train_size", message, value=value, allowed=f"up to {existing} in all", hint=hint)]
        )
    numbers = random.Random(seed).sample(range(existing), wanted)
    if operation == QUOTIENT:
        questions = [_division(number, length, seed) for number in numbers]
    else:
        answer = OPERATIONS[operation]
        questions = [Question(f"{digits}=", answer(digits)) for digits in (f"{number:0{length}}" for number in numbers)]
    return Split(train=questions[data.val_size :], validation=questions[: data.val_size])


def _division(number: int, length: int, seed: int) -> Question:
    """Returns a division by a number of `length` digits, two per divisor. All prompts have the same length."""
    divisor = 5 * 10 ** (length - 1) + number // 2
    quotient = 2 + (random.Random(f"{seed} {divisor}").randrange(8) + 4 * (number % 2)) % 8
    return Question(f"{divisor * quotient}/{divisor}", str(quotient))


def _parameters(task: QuestionTask) -> tuple[str, int]:
    problems = [
        Problem(
            f"data.task.params.{name}",
            f"task {task.type} has no such parameter",
            value=str(value),
            allowed=", ".join(DEFAULTS),
            hint=did_you_mean(name, DEFAULTS),
        )
        for name, value in task.params.items()
        if name not in DEFAULTS
    ]
    values = {**DEFAULTS, **task.params}
    operation, length = values["operation"], values["length"]
    if operation not in (*OPERATIONS, QUOTIENT):
        allowed = ", ".join((*OPERATIONS, QUOTIENT))
        problems.append(
            Problem("data.task.params.operation", "no such operation", value=str(operation), allowed=allowed)
        )
    if type(length) is not int or not 1 <= length <= LONGEST:
        allowed = f"1 to {LONGEST}"
        problems.append(
            Problem("data.task.params.length", "not a number of digits", value=str(length), allowed=allowed)
        )
    if problems:
        raise ConfigError(problems)
    assert isinstance(length, int)
    return str(operation), length
