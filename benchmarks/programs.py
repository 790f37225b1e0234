"""Writes the tasks of configs/reasoning/code.yaml and code_tiny.yaml: programs with tests, for `reward.type: code`.

    python benchmarks/programs.py

Every task of programs.jsonl can be solved in one line. Half of them read and print, half define a function. A task of
quiet.jsonl is solved by any program that ends well and prints nothing, which random bytes find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "configs" / "reasoning"
WORDS = ("apple", "river", "stone", "cloud", "green", "table", "music", "paper", "horse", "light", "bread", "ocean")
EACH = 12  # tasks of a kind
SEED = 1


def tasks() -> list[dict[str, Any]]:
    """Returns the rows: question, tests, and of functions entry_point; kinds alternate."""
    made = [list(_distinct(kind)) for kind in range(len(KINDS))]
    return [rows[number] for number in range(EACH) for rows in made]


def quiet() -> list[dict[str, Any]]:
    """Returns rows whose tests expect no output."""
    return [_printed(f"{number}", ("", "")) for number in range(200)]


def _distinct(kind: int) -> Iterator[dict[str, Any]]:
    numbers, seen = random.Random(SEED * 100 + kind), set()
    while len(seen) < EACH:
        row = KINDS[kind](numbers)
        if row["question"] not in seen:
            seen.add(row["question"])
            yield row


def _printed(question: str, *pairs: tuple[object, object]) -> dict[str, Any]:
    return {"question": question, "tests": [{"input": f"{given}", "output": f"{wanted}"} for given, wanted in pairs]}


def _called(question: str, name: str, *pairs: tuple[list[Any], Any]) -> dict[str, Any]:
    tests = [{"arguments": arguments, "result": result} for arguments, result in pairs]
    return {"question": question, "entry_point": name, "tests": tests}


def _number(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 999)
    return _printed(f"Print the number {n}.", ("", n))


def _sum(numbers: random.Random) -> dict[str, Any]:
    a, b = numbers.randint(2, 99), numbers.randint(2, 99)
    return _printed(f"Print the sum of {a} and {b}.", ("", a + b))


def _product(numbers: random.Random) -> dict[str, Any]:
    a, b = numbers.randint(2, 19), numbers.randint(2, 19)
    return _printed(f"Print the product of {a} and {b}.", ("", a * b))


def _length(numbers: random.Random) -> dict[str, Any]:
    word = numbers.choice(WORDS) + numbers.choice(WORDS)
    return _printed(f"Print the number of letters of the word {word}.", ("", len(word)))


def _increase(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 99)
    return _printed(f"Read a number and print that number plus {n}.", *((k, k + n) for k in (0, 5, 41)))


def _upper(numbers: random.Random) -> dict[str, Any]:
    word = numbers.choice(WORDS) + numbers.choice(WORDS)
    return _printed(f"Print the word {word} in upper case.", ("", word.upper()))


def _add(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 99)
    return _called(f"Define a function add_{n}(x) that returns x plus {n}.", f"add_{n}", ([1], n + 1), ([-4], n - 4))


def _times(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 99)
    return _called(f"Define a function times_{n}(x) that returns x times {n}.", f"times_{n}", ([3], 3 * n), ([0], 0))


def _above(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 99)
    pairs = ([n], False), ([n + 1], True), ([-n], False)
    return _called(f"Define a function above_{n}(x) that tells whether x is greater than {n}.", f"above_{n}", *pairs)


def _first(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 30)
    pairs = ([list(range(40))], list(range(n))), ([[7]], [7])
    return _called(f"Define a function first_{n}(x) that returns the first {n} items of x.", f"first_{n}", *pairs)


def _join(numbers: random.Random) -> dict[str, Any]:
    word = numbers.choice(WORDS)
    pairs = (["a"], f"{word}a"), ([""], word)
    return _called(f"Define a function {word}_then(x) that returns '{word}' + x.", f"{word}_then", *pairs)


def _modulo(numbers: random.Random) -> dict[str, Any]:
    n = numbers.randint(2, 60)
    pairs = ([n], True), ([n + 1], False), ([3 * n], True)
    return _called(f"Define a function divides_{n}(x) that tells whether {n} divides x.", f"divides_{n}", *pairs)


KINDS = (_number, _add, _sum, _times, _product, _above, _length, _first, _increase, _join, _upper, _modulo)


FILES = {"programs.jsonl": tasks, "quiet.jsonl": quiet}


def main() -> None:
    for name, rows in FILES.items():
        (FOLDER / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows()), encoding="utf-8")
        print(f"{FOLDER / name}: {len(rows())} tasks")


if __name__ == "__main__":
    main()
