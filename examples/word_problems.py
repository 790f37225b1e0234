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
    # something is added
    ("{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does {name} have now?", +1),
    ("{name} finds {b} {things} and already had {a}. How many {things} does {name} have?", +1),
    ("{name} puts {b} {things} beside the {a} that are already there. How many {things} are there now?", +1),
    ("On Monday {name} counted {a} {things}, on Tuesday {b} more. How many {things} is that in all?", +1),
    ("A shop has {a} {things}. A truck brings {b} more. How many {things} has the shop now?", +1),
    ("{name} wins {b} {things} in a game and had {a} before. What is the new number of {things}?", +1),
    ("{a} {things} lie in a drawer. {friend} adds {b}. How many {things} lie in the drawer now?", +1),
    ("{name} buys {a} {things} today and {b} {things} tomorrow. How many {things} does {name} buy?", +1),
    ("After {name} got {b} {things} from {friend}, how many {things} did {name} have, if there were {a} before?", +1),
    # two parts make a whole
    ("There are {a} {things} on the table and {b} in the box. How many {things} are there together?", +1),
    ("{name} found {a} {things}. {friend} found {b} {things}. How many did they find in total?", +1),
    ("{a} of the {things} are red and {b} are blue. How many {things} are red or blue?", +1),
    ("One jar holds {a} {things}, another holds {b}. How many {things} do the two jars hold?", +1),
    (
        "{name} and {friend} share a shelf. {a} {things} belong to {name}, {b} to {friend}. How many {things} is that?",
        +1,
    ),
    ("{name} packs {a} {things} in a red bag and {b} in a green bag. How many {things} are packed?", +1),
    # something is taken away
    ("{name} had {a} {things} and lost {b} of them. How many {things} are left?", -1),
    ("{name} bought {a} {things} and gave {b} to {friend}. How many {things} does {name} still have?", -1),
    ("A bag holds {a} {things}. {name} takes {b} out. How many {things} stay in the bag?", -1),
    ("{name} sells {b} of {a} {things}. How many {things} remain?", -1),
    ("Of {a} {things}, {b} are broken. How many {things} are not broken?", -1),
    ("There were {a} {things} in a bowl. {friend} used {b} of them. How many {things} are still there?", -1),
    ("{friend} borrows {b} {things} from {name}, who had {a}. How many {things} does {name} keep?", -1),
    ("{a} {things} stood on a wall and {b} fell down. How many {things} did not fall?", -1),
    ("{name} hides {b} of the {a} {things}. How many {things} can one see?", -1),
    ("A box came with {a} {things}. {name} threw {b} away. How many {things} were kept?", -1),
    ("{name} spends {b} of {a} {things}. How many {things} are unspent?", -1),
    ("There are {a} {things}. {b} of them are mine and the others are yours. How many {things} are yours?", -1),
    # a comparison gives the other number
    ("{name} has {a} {things}, {friend} has {b} more than {name}. How many {things} does {friend} have?", +1),
    ("{friend} has {b} {things} more than {name}. {name} has {a}. How many {things} has {friend}?", +1),
    ("{name} made {a} {things}. {friend} made {b} more. How many {things} did {friend} make?", +1),
    ("{name} has {a} {things}, {friend} has {b} fewer. How many {things} does {friend} have?", -1),
    ("{friend} has {b} {things} less than {name}. {name} has {a}. How many {things} has {friend}?", -1),
    ("{name} drew {a} {things}. {friend} drew {b} fewer. How many {things} did {friend} draw?", -1),
    # the difference is the question
    ("{name} has {a} {things}, {friend} has {b}. How many {things} does {name} have more than {friend}?", -1),
    ("{name} has {a} {things} and {friend} has {b}. What is the difference?", -1),
    ("{friend} has {b} {things}. {name} has {a}. How many {things} must {friend} get to have as many as {name}?", -1),
    ("A book of {name} has room for {a} {things}. {b} are in it. How many {things} still fit in?", -1),
    ("{name} wants to collect {a} {things} and has {b} so far. How many {things} are missing?", -1),
    ("{name} must carry {a} {things} and carried {b}. How many {things} must {name} still carry?", -1),
    ("{a} children want {things}, but there are only {b} {things}. How many children get none?", -1),
    ("Yesterday {name} had {b} {things}, today {a}. How many {things} did {name} get since yesterday?", -1),
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
            a = draw.randint(3, LARGEST - 2)
            b = draw.randint(2, LARGEST - a if sign > 0 else a - 1)
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
