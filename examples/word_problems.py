"""Writes word problems about sums and differences, as files that `data.task.type: jsonl` reads.

    python examples/word_problems.py configs/reasoning     # word_problems.jsonl and word_problems_val.jsonl

The validation questions have wordings, names and things of their own: a model that learned sentences by heart fails.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

Wording = tuple[str, int]
"""A question with {name}, {friend}, {things}, {a} and {b}, and the sign of b in its answer."""

TRAINING: tuple[Wording, ...] = (
    ("{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does {name} have now?", +1),
    ("{name} had {a} {things} and lost {b} of them. How many {things} are left?", -1),
    ("There are {a} {things} on the table and {b} in the box. How many {things} are there together?", +1),
    ("{name} bought {a} {things} and gave {b} to {friend}. How many {things} does {name} still have?", -1),
    ("{name} found {a} {things}. {friend} found {b} {things}. How many did they find in total?", +1),
    ("A bag holds {a} {things}. {name} takes {b} out. How many {things} stay in the bag?", -1),
    ("On Monday {name} counted {a} {things}, on Tuesday {b} more. How many {things} is that in all?", +1),
    ("{name} has {a} {things}, {friend} has {b} fewer. How many {things} does {friend} have?", -1),
    ("{name} has {a} {things}, {friend} has {b} more than {name}. How many {things} does {friend} have?", +1),
    ("Of {a} {things}, {b} are broken. How many {things} are not broken?", -1),
    ("{name} puts {b} {things} beside the {a} that are already there. How many {things} are there now?", +1),
    ("{name} sells {b} of {a} {things}. How many {things} remain?", -1),
)
VALIDATION: tuple[Wording, ...] = (
    ("{name} owns {a} {things} and receives {b} as a present. How many {things} does {name} own?", +1),
    ("{a} {things} were in the basket. {name} ate {b}. How many {things} were not eaten?", -1),
    ("{friend} carries {b} {things}, {name} carries {a}. How many {things} do both carry?", +1),
    ("{name} needs {a} {things} and has {b}. How many more {things} does {name} need?", -1),
)
TRAINING_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack")
VALIDATION_NAMES = ("Lena", "Marco", "Nora", "Oscar", "Paula", "Tom")
TRAINING_THINGS = ("apples", "books", "coins", "cards", "marbles", "pencils", "stones", "shells", "stamps", "eggs")
VALIDATION_THINGS = ("pears", "nuts", "cookies", "plums", "oranges")
LARGEST = 20  # of the numbers in a question and of the answer


def problems(
    wordings: Sequence[Wording], names: Sequence[str], things: Sequence[str], seed: int
) -> Iterator[tuple[str, str]]:
    """Yields questions and answers without end, each wording equally often."""
    draw = random.Random(seed)
    while True:
        for wording, sign in wordings:
            a = draw.randint(2, LARGEST - 1)
            b = draw.randint(1, LARGEST - a if sign > 0 else a - 1)
            name, friend = draw.sample(names, 2)
            question = wording.format(name=name, friend=friend, things=draw.choice(things), a=a, b=b)
            yield question, str(a + sign * b)


def write(path: Path, count: int, source: Iterator[tuple[str, str]]) -> None:
    """Writes `count` different questions, one JSON object a line."""
    found: dict[str, str] = {}
    while len(found) < count:
        question, answer = next(source)
        found.setdefault(question, answer)
    lines = (json.dumps({"question": question, "answer": answer}) for question, answer in found.items())
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_all(folder: Path) -> None:
    """Writes the questions for training and for validation."""
    write(folder / "word_problems.jsonl", 2000, problems(TRAINING, TRAINING_NAMES, TRAINING_THINGS, seed=1))
    write(folder / "word_problems_val.jsonl", 200, problems(VALIDATION, VALIDATION_NAMES, VALIDATION_THINGS, seed=2))


if __name__ == "__main__":
    write_all(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
