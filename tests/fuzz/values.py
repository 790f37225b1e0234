"""Random values that no one should write, and random damage to texts, bytes and trees."""

from __future__ import annotations

import copy
import random
from typing import Any

SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400),
    *(0.0, -0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), 0.1),
    *("", " ", "x", "null", "auto", "all", "0-3", "1:0", "a" * 3000, "\u202e", "é", "日本", "${", "${}", "$${x}", "!x"),
    *("${runner.seed}", "${runner}", "${runner.experiment_name}", "../../etc/passwd", "/dev/zero", "/proc/self/mem"),
    *("http://user:hunter2@host/x", "http://[", "os:system", "a:b", "%s%n", "{response}", "1e5", "0x10", "yes", "."),
    *(
        ".inf",
        "~",
        "--plan",
        "\\",
        "'",
        '"',
        "[",
        "{",
        "*a",
        "&a",
        "<<",
        "float16",
        "llama",
        "..",
        "a/b",
        "(((a",
        "(a+)+$",
    ),
)


def value(numbers: random.Random, depth: int = 0) -> Any:
    """A scalar, list or mapping."""
    roll = numbers.random()
    if roll < 0.8 or depth > 3:
        return numbers.choice(SCALARS)
    if roll < 0.9:
        return [value(numbers, depth + 1) for _ in range(numbers.randrange(4))]
    return {
        numbers.choice(("a", "type", "path", "0", "")): value(numbers, depth + 1) for _ in range(numbers.randrange(4))
    }


def nested(depth: int, inner: Any = 1) -> Any:
    """`inner` inside that many lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside mappings and lists."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for name, inner in entries:
        found += [(*path, name), *places(inner, (*path, name))]
    return found


def changed(tree: Any, numbers: random.Random, times: int = 1) -> Any:
    """A copy of the tree in which keys are missing, added, renamed or have other values."""
    tree = copy.deepcopy(tree)
    for _ in range(times):
        spots = places(tree)
        if not spots:
            return value(numbers)
        *path, last = numbers.choice(spots)
        inner = tree
        for step in path:
            inner = inner[step]
        match numbers.randrange(6):
            case 0:
                del inner[last]
            case 1 if isinstance(inner, dict):
                inner[f"{last}{numbers.choice(('s', '_', '.x', ' ', ''))}"] = inner.pop(last)
            case 2 if isinstance(inner, dict):
                inner[numbers.choice(("x", "type", "path", "__class__", "a.b", "1"))] = value(numbers)
            case 3:
                inner[last] = copy.deepcopy(inner)
            case _:
                inner[last] = value(numbers)
    return tree


def damaged(data: bytes, numbers: random.Random) -> bytes:
    """The bytes with a part flipped, cut, doubled, filled or inserted."""
    if not data:
        return numbers.randbytes(20)
    start = numbers.randrange(len(data))
    length = min(len(data) - start, numbers.choice((1, 1, 2, 8, 64, 5000)))
    before, part, after = data[:start], data[start : start + length], data[start + length :]
    match numbers.randrange(7):
        case 0:
            return before
        case 1:
            return before + after
        case 2:
            return before + part + part + after
        case 3:
            return before + bytes(length) + after
        case 4:
            return before + numbers.choice((b"\0", b"\xff", b"\n", b" ", b"\t", b"{", b"]", b'"', b"9" * 5000)) + after
        case 5:
            return before + bytes([part[0] ^ (1 << numbers.randrange(8))]) + part[1:] + after
        case _:
            return before + numbers.randbytes(length) + after
