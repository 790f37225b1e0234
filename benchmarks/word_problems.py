"""Writes the questions of configs/reasoning/word_problems.yaml: arithmetic with one or two operations, told in words.

    python benchmarks/word_problems.py

Each kind of problem has several wordings. The last one of a kind occurs in word_problems_new.jsonl only, so validation
asks in words that training never uses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs" / "reasoning"
NAMES = ("Mia", "Tom", "Ana", "Leo", "Sara", "Ben", "Nora", "Max", "Ida", "Paul", "Lena", "Omar", "Rosa", "Finn")
THINGS = ("apples", "marbles", "stamps", "books", "pencils", "shells", "coins", "cards", "eggs", "balloons", "stickers")
BOXES = ("boxes", "bags", "baskets", "jars", "drawers")
TRAINING, NEW, SEED = 1200, 200, 1
Numbers = tuple[int, int, int]  # of a question; the third one is 0 in a problem with one operation


def _gain(draw: random.Random) -> tuple[Numbers, int]:
    a, b = draw.randint(2, 50), draw.randint(2, 40)
    return (a, b, 0), a + b


def _loss(draw: random.Random) -> tuple[Numbers, int]:
    a, b = draw.randint(2, 50), draw.randint(2, 40)
    return (a + b, b, 0), a


def _groups(draw: random.Random) -> tuple[Numbers, int]:
    a, b = draw.randint(2, 10), draw.randint(2, 10)
    return (a, b, 0), a * b


def _shares(draw: random.Random) -> tuple[Numbers, int]:
    a, b = draw.randint(2, 10), draw.randint(2, 10)
    return (a * b, b, 0), a


def _gain_and_loss(draw: random.Random) -> tuple[Numbers, int]:
    a, b = draw.randint(2, 30), draw.randint(2, 20)
    c = draw.randint(1, a)
    return (a, b, c), a + b - c


def _groups_and_gain(draw: random.Random) -> tuple[Numbers, int]:
    a, b, c = draw.randint(2, 9), draw.randint(2, 9), draw.randint(1, 20)
    return (a, b, c), a * b + c


KINDS: dict[Callable[[random.Random], tuple[Numbers, int]], tuple[str, ...]] = {
    _gain: (
        "{one} has {a} {things}. {two} gives {one} {b} more. How many {things} does {one} have now?",
        "There are {a} {things} on the table. {one} puts {b} more there. How many {things} are on the table?",
        "{one} has {a} {things}, and {two} has {b} {things}. How many {things} do they have together?",
        "{one} found {a} {things} on Monday and {b} {things} on Tuesday. How many {things} did {one} find?",
    ),
    _loss: (
        "{one} has {a} {things}. {one} gives {b} of them to {two}. How many {things} does {one} have left?",
        "There are {a} {things} on the table. {one} takes {b} away. How many {things} are still there?",
        "{one} wants {a} {things} and has {b}. How many {things} does {one} still need?",
        "{one} had {a} {things} and lost {b} of them. How many {things} remain?",
    ),
    _groups: (
        "{one} has {a} {boxes} with {b} {things} each. How many {things} does {one} have?",
        "{one} buys {b} {things} every day. How many {things} does {one} buy in {a} days?",
        "There are {a} rows of {b} {things}. How many {things} are there?",
        "Each of {a} children has {b} {things}. How many {things} do the children have?",
    ),
    _shares: (
        "{one} shares {a} {things} equally among {b} children. How many {things} does each child get?",
        "{one} puts {a} {things} into {b} {boxes}, the same number in each. How many {things} are in each?",
        "{a} {things} stand in {b} equal rows. How many {things} are in a row?",
        "{b} friends split {a} {things} evenly. How many {things} does each friend receive?",
    ),
    _gain_and_loss: (
        "{one} has {a} {things}, buys {b} more and gives {c} to {two}. How many {things} does {one} have now?",
        "There are {a} {things} in a box. {one} adds {b} and {two} takes {c}. How many {things} are in the box?",
        "{one} had {a} {things}. {two} brought {b} more, but {c} broke. How many {things} are left?",
    ),
    _groups_and_gain: (
        "{one} has {a} {boxes} with {b} {things} each and {c} more {things}. How many {things} does {one} have?",
        "{one} picks {b} {things} a day for {a} days. {two} adds {c}. How many {things} are there?",
        "There are {a} rows of {b} {things}, and {c} {things} lie beside them. How many {things} are there in all?",
    ),
}


def problems(new: bool, count: int) -> list[dict[str, str]]:
    """Returns distinct rows with question and answer; kinds alternate. new: in the last wording of each kind."""
    draw, rows = random.Random(SEED + new), dict[str, str]()
    kinds = list(KINDS.items())
    while len(rows) < count:
        numbers, wordings = kinds[len(rows) % len(kinds)]
        (a, b, c), answer = numbers(draw)
        wording = wordings[-1] if new else draw.choice(wordings[:-1])
        one, two = draw.sample(NAMES, 2)
        words = {"one": one, "two": two, "things": draw.choice(THINGS), "boxes": draw.choice(BOXES)}
        rows[wording.format(a=a, b=b, c=c, **words)] = str(answer)
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def main() -> None:
    for name, new, count in (("word_problems.jsonl", False, TRAINING), ("word_problems_new.jsonl", True, NEW)):
        text = "".join(f"{json.dumps(row)}\n" for row in problems(new, count))
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"{FOLDER / name}: {count} questions")


if __name__ == "__main__":
    main()
