"""Compares an answer with the expected one by the type of the expected one.

math-verify compares what two answers have in common after their type is checked: it reads `8:20` as `4:10`, `(1, 2)` as
`{1, 2}` and `0 = 42` as 42. Formulas in a response are evaluated in a process of their own (`fork.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from rl_platform.envs.reasoning.answers.arithmetic import evaluate
from rl_platform.envs.reasoning.answers.finding import find_answer, is_hedged, is_inexact, last_number, reserved
from rl_platform.envs.reasoning.answers.fork import in_fork
from rl_platform.envs.reasoning.answers.notation import normalized
from rl_platform.envs.reasoning.answers.quantity import Quantity, is_scale, is_unit, parse_quantity

_LONGEST = 10_000  # characters of an answer


class Collection(NamedTuple):
    """Several answers. brackets: empty for a list without them, which is a set."""

    brackets: str
    items: tuple[str, ...]


class TimeOfDay(NamedTuple):
    """A time or a ratio as it is written."""

    parts: tuple[int, ...]
    half: str


class Type(NamedTuple):
    """A type of answer. read: returns None for an answer of another type. equal: expected and given, as read; None: by
    math-verify, if the types are equal."""

    name: str
    read: Callable[[str], Any]
    equal: Callable[[Any, Any], bool | None]


def matches(response: str, expected: str, question: str) -> bool:
    """Returns whether a response gives the expected answer and no other. A formula of the question is no answer to it.

    Raises ValueError for an expected answer that math-verify cannot read, and if a comparison fails.
    """
    given = find_answer(response, expected)
    if given is None:
        return False
    if expected.strip() == given.strip() != "":
        return True
    (name, wanted), (given_name, got) = _without_name(normalized(expected)), _without_name(normalized(given))
    if len(got) > _LONGEST or (name and given_name and name != given_name):
        return False
    kinds = TYPES[1:] if "$" in expected else TYPES  # letters in $...$ are variables
    kind, want = next((kind, want) for kind in kinds if (want := kind.read(wanted)) is not None)
    if kind.name == "quantity":
        return any(want.equals(quantity) for quantity in _quantities(got, want))
    have = kind.read(got)
    verdict = False if have is None or _hedged(kind, got, wanted) else kind.equal(want, have)
    if verdict is not None:
        return verdict
    copied = _squeezed(got) in _squeezed(question) and _squeezed(got) != _squeezed(wanted)
    if copied and len(_squeezed(got)) > 2:
        return False
    words, given_words = (sorted(_WORD.findall(_COMMAND.sub(" ", text))) for text in (wanted, got))
    if words != given_words and "$" not in expected:  # math-verify reads letters as a product: `stop` equals `pots`
        return False
    gold = _parsed(wanted)
    return bool(in_fork(lambda: float(_equal_formulas(gold, got))))


def _hedged(kind: Type, given: str, expected: str) -> bool:
    text = _SEPARATOR.sub(" ", given).removeprefix("\\pm") if kind.name == "collection" else given
    return reserved(text) and not reserved(expected)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s${}]|\\[()]", "", text)


# Types ---------------------------------------------------------------------------------------------------------------

_COMMAND = re.compile(r"\\[A-Za-z]+")
_NOT_WORDS = re.compile(r"[\d+*^=<>_|]|\\[A-Za-z]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_CHOICE = re.compile(r"\(?[A-Z]\)?")
_CLOCK = re.compile(r"(\d{1,9}(?:\s*:\s*\d{1,9})+)\s*([ap])?\.?\s*(?:m\.?)?", re.IGNORECASE)
_SIGN = re.compile(r"<=|>=|!=|<|>|=")
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_NAME = re.compile(
    r"(\([a-z, ]+\)|(?:[A-Za-z]'*|\\[a-z]+|\\frac\{d\w?\}\{d\w\})(?:_\{?\w+\}?)?(?:\([^()]*\))?)"
    r"\s*(?:=|\\in\b)\s*([^=<>]*)"
)
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_OPENING = {"\\{": "{", "{": "{", "(": "(", "[": "[", "\\langle": "("}
_CLOSING = {"\\}": "}", "}": "}", ")": ")", "]": "]", "\\rangle": ")"}
_BRACKET_OR_SEPARATOR = re.compile(rf"\\[{{}}]|\\[lr]angle|[](){{}}[]|{_SEPARATOR.pattern}")
_NUMBER_AND_WORDS = re.compile(
    r"(?P<number>[^\w.]*?(?P<currency>[$\N{EURO SIGN}\N{POUND SIGN}]?)[-+\s]*[\d.,/]*\d)(?P<words>.*)", re.DOTALL
)
_LINKS = ("per", "squared", "cubed")
_UNEVALUATED = re.compile(
    r"frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)\s*[a-z]|\bd/d[a-z]|\\(?:int|sum|prod|lim|binom)\b|'"
)


def _read_words(text: str) -> str | None:
    """Answers without formulas and digits, and the letter of a choice."""
    if _CHOICE.fullmatch(text):
        return text.strip("()")
    if _NOT_WORDS.search(text) or not _WORD.search(text):
        return None
    return " ".join(re.sub(r"[${}]|\\ ", " ", text).split()).casefold()


def _read_clock(text: str) -> TimeOfDay | None:
    match = _CLOCK.fullmatch(text)
    return TimeOfDay(tuple(map(int, match[1].split(":"))), (match[2] or "").lower()) if match else None


def _equal_clocks(expected: TimeOfDay, given: TimeOfDay) -> bool:
    half = given.half if expected.half else ""
    return expected == TimeOfDay(given.parts, half)


def _read_collection(text: str) -> Collection | None:
    """Sets, tuples, intervals, unions, and lists without brackets."""
    if text.startswith("\\pm"):
        return Collection("", (text[3:].strip(), f"-{text[3:].strip()}"))
    if "\\cup" in text:
        return Collection("\\cup", tuple(part.strip() for part in text.split("\\cup")))
    cuts, depth, first_end = [], 0, len(text)
    for match in _BRACKET_OR_SEPARATOR.finditer(text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
            first_end = match.end() if depth == 0 and first_end == len(text) else first_end
        else:
            cuts.append((depth, match.span()))
    opening = next((sign for sign in _OPENING if text.startswith(sign)), "")
    closing = next((sign for sign in _CLOSING if text.endswith(sign)), "")
    framed = bool(opening and closing) and depth == 0 and first_end == len(text)
    edges = [edge for level, span in cuts if level == int(framed) for edge in span]
    brackets = _OPENING[opening] + _CLOSING[closing] if framed else ""
    if not edges and brackets != "{}":
        return None
    edges = [len(opening), *edges, len(text) - len(closing)] if framed else [0, *edges, len(text)]
    items = (text[left:right].strip() for left, right in zip(edges[::2], edges[1::2], strict=True))
    return Collection(brackets, tuple(item for item in items if item))


def _items(collection: Collection) -> list[Quantity] | None:
    """Returns the items as quantities; None if one of them is no quantity."""
    read = [parse_quantity(_without_name(item)[1]) for item in collection.items]
    quantities = [quantity for quantity in read if quantity is not None]
    return quantities if len(quantities) == len(read) else None


def _equal_collections(expected: Collection, given: Collection) -> bool | None:
    ordered = expected.brackets not in ("", "{}", "\\cup")
    same = expected.brackets == given.brackets or {expected.brackets, given.brackets} == {"", "{}"}
    if not same or len(expected.items) != len(given.items):
        return False
    wanted, got = _items(expected), _items(given)
    if wanted is None:
        return None if _frames(expected) == _frames(given) else False
    if got is None:
        return False
    if ordered:
        return all(want.equals(have) for want, have in zip(wanted, got, strict=True))
    for want in wanted:
        equal = next((have for have in got if want.equals(have)), None)
        if equal is None:
            return False
        got.remove(equal)
    return True


def _frames(collection: Collection) -> list[str]:
    parts = [_read_collection(item) for item in collection.items]
    return sorted(part.brackets if part else "" for part in parts)


def _read_relation(text: str) -> tuple[str, ...] | None:
    """Returns the signs of an equation or inequality in one direction, so that `3 < x` and `x > 3` have the same."""
    signs = _SIGN.findall(text)
    mirrored = [_MIRRORED.get(sign, sign) for sign in reversed(signs)]
    return tuple(min(signs, mirrored)) if signs else None


def _read_formula(text: str) -> frozenset[str] | None:
    """Returns the operators that a formula leaves to the reader: derivatives, integrals, sums, limits."""
    others = (_read_clock, _read_collection, _read_relation)
    return None if any(read(text) is not None for read in others) else frozenset(_UNEVALUATED.findall(text))


TYPES = (  # the expected answer has the first type that reads it
    Type("words", _read_words, lambda expected, given: expected == given),
    Type("time or ratio", _read_clock, _equal_clocks),
    Type("quantity", parse_quantity, Quantity.equals),
    Type("collection", _read_collection, _equal_collections),
    Type("relation", _read_relation, lambda expected, given: None if expected == given else False),
    Type("formula", _read_formula, lambda expected, given: None if given <= expected else False),
)


def _without_name(text: str) -> tuple[str, str]:
    r"""Returns the name and the rest of `x = 5`, `f(x) = 2x` and `x \in (0, 1)`; no name for other text."""
    match = _NAME.fullmatch(text)
    return (match[1], match[2]) if match else ("", text)


def _quantities(text: str, expected: Quantity) -> list[Quantity]:
    """Returns the quantities that an answer may mean: the whole of it, and of a sentence its last number with the next
    words.

    Empty for a false equation and for reservations.
    """
    left, _, right = text.rpartition("=")
    whole = parse_quantity(right.strip())
    if (
        reserved(text)
        or set(_SIGN.findall(text)) - {"="}
        or (any(map(str.isdigit, left)) and (whole is None or _value(left) != whole.number))
    ):
        return []
    tail = "" if whole is None else re.split(r"\d", right)[-1]
    if is_hedged("", tail) or is_inexact(tail):
        return []
    has_words = _WORD.search(_COMMAND.sub(" ", right)) is not None
    sentence = right if whole is not None else last_number(right) if has_words else None
    parts = _NUMBER_AND_WORDS.match(sentence or "")
    if parts is None:
        return []
    words = [word.strip("*$.)") for word in re.split(r"[,;:](?!\d)", parts["words"])[0].split()]
    if expected.unit:
        first = int(bool(words) and not parts["currency"])
        counts = [count for count in range(first, min(len(words), 4) + 1) if not _inside_unit(words, count)]
    else:
        counts = [next((count for count, word in enumerate(words) if not is_scale(word)), len(words))]
    readings = [parse_quantity(f"{parts['number']} {' '.join(words[:count])}".strip()) for count in counts]
    return [quantity for quantity in (whole, *readings) if quantity is not None]


def _inside_unit(words: list[str], count: int) -> bool:
    """Returns whether the first `count` words end within a unit, as `5 km` of `5 km per hour`."""
    following = words[count] if count < len(words) else ""
    return (
        following[:1] in ("/", "^") or following in _LINKS or is_unit(following) or words[count - 1 : count] == ["per"]
    )


def _value(calculation: str) -> Fraction | None:
    """Returns the value of a formula of + - * / and parentheses; None for anything else."""
    try:
        return evaluate(calculation.replace("\\times", "*").replace("\\cdot", "*").replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return None


# Formulas ------------------------------------------------------------------------------------------------------------


def _parsed(expected: str) -> list[object]:
    """Returns the formula of an expected answer. No model wrote it, and reading it here makes copies of this process
    quick."""
    from math_verify import parse

    gold: list[object] = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the expected answer {expected!r}")
    return gold


def _equal_formulas(gold: list[object], given: str) -> bool:
    from math_verify import parse, verify

    equal: bool = verify(gold, parse(f"\\boxed{{{given}}}", parsing_timeout=None), timeout_seconds=None)
    return equal


_TYPICAL = (  # pairs whose comparison fills the tables of math-verify's parser and sympy's caches
    ("x^2 + 3x + 9", "3x + 9 + x^2"),
    (r"\frac{x+1}{2}", r"\frac{x}{2} + 0.5"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"(-\infty, 1] \cup (2, 3)", r"(-\infty, 1) \cup (2, 3)"),
    ("x > 1", "1 < x"),
    (r"\{x, 2\}", r"x, 2"),
    ("y = 2x - 1", "2x = y + 1"),
    (r"e^{x} \sin(x) + \log 2", r"\ln(2) + e^x \sin x"),
)


def warm_up() -> None:
    """Compares typical formulas, so that copies of this process are quick."""
    for expected, given in _TYPICAL:
        _equal_formulas(_parsed(expected), given)
