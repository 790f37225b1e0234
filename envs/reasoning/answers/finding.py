"""Finds the answer in a response: marked, or the last number or formula of a statement without reservations.

A response with several different marked answers, a list of candidates, a negation or a condition has no answer.
"""

from __future__ import annotations

import re

from rl_platform.envs.reasoning.answers.notation import normalized
from rl_platform.envs.reasoning.answers.quantity import NUMBER, parse_quantity

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_STATED = re.compile(r"\banswer(?: is|:)(?! *\n)\s*:?\s*(.+?)(?=[.!?](?:\s|$)|\n|$)", re.IGNORECASE)
_MARK_BEFORE = re.compile(r"(?:<answer>|\\(?:boxed|fbox)\s*\{|\\\(|\\\[|[$#*\s])+$")
_MARK_AFTER = re.compile(r"^(?:</answer>|\}|\\\)|\\\]|[$*])+")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

# Reservations about the whole statement; about the words directly after them; and those that follow the answer.
_RESERVATIONS = (
    r"\b(?:not|never|neither|nor|cannot|doubt|except|or|either|maybe|perhaps|possibly|probably|might|could|would|unsure"
    r"|uncertain|unlikely|hardly|guess|if|in case|as long as|unless|otherwise|provided (?:that|\w+ (?:is|are))|assuming"
    r"|suppose|let(?: u|')s say|depends|alternatively|else|(?:rather|other|different|far) (?:than|from)|differs from"
    r"|instead of|anything but|torn|candidates|(?:option|candidate|answer|choice) (?:[a-e]|\d+)(?=[:.)])|no,? wait"
    r"|(?-i:may)|(?:is|it's|be) (?:false|wrong|incorrect)|(?:false|wrong|incorrect) answer)\b"
    r"|n['\N{RIGHT SINGLE QUOTATION MARK}]t\b|[~?\N{ALMOST EQUAL TO}\N{NOT SIGN}\N{PLUS-MINUS SIGN}\N{NOT EQUAL TO}]|!="
    r"|\\(?:approx|sim|simeq|cong|pm|mp|neg|lnot|neq?|lor|vee)\b"
)
_INEXACT = (
    r"(?:no|approximately|approx|roughly|about|around|nearly|almost|circa|ca|close to|near|at least|at most|up to|under"
    r"|over|above|below|(?:more|less|greater|fewer|larger|smaller|higher|lower) than)"
)
_RESERVED = re.compile(_RESERVATIONS, re.IGNORECASE)
_BOUND = r"(?:[<>!\N{LESS-THAN OR EQUAL TO}\N{GREATER-THAN OR EQUAL TO}]=?|\\[lg](?:eq?|t))"
_RETRACTIONS = (
    r"ish|no|wait|actually|false|wrong|incorrect|oops|sorry|just kidding|scratch that|on second thoughts?"
    r"|squared|cubed|factorial"
)
_OPERATION = r"(?:minus|negative|twice|double|triple|(?:half|root|opposite|negative|inverse|reciprocal) of)"
_BEFORE = re.compile(rf"\b(?:{_INEXACT}|{_OPERATION})\W*$|{_BOUND}\s*$|(?:^|\s)\d+:$|[\^_]\{{?$", re.IGNORECASE)
# A box in a calculation is an operand, not an answer: `-\boxed{42}`, `\boxed{42}/2`. A list item `- \boxed{42}` and
# `\boxed{42}^\circ` are answers.
_OPERAND_AFTER = re.compile(
    r"(?:[\d/^+]|(?<!-)-|\\(?:cdot|times|div)\s*|\\(?:sqrt|[dt]?frac)\s*(?:\[[^]]*\])?(?:\{[^{}]*\})?\{)"
    r"\\(?:boxed|fbox)\s*\{$"
)
_OPERAND_BEFORE = re.compile(
    r" *(?:[-+/] *(?:[\d(]|\\(?!text|mathrm))|\^(?!\s*\{?\s*\\circ)|\\(?:cdot|times|div)\b|[.,]\d)"
)
_INEXACT_WORD = re.compile(rf"\b{_INEXACT}\b", re.IGNORECASE)
_AFTER = re.compile(
    rf"[\W_]*(?:(?:is|was|hmm|but|and)\W+)?(?:{_RESERVATIONS}|(?:{_RETRACTIONS}|{_INEXACT})\b)", re.IGNORECASE
)
_CLAUSE = re.compile(r"[,;:.!?\n](?!\d)|\b(?:so|thus|hence|therefore|then)\b", re.IGNORECASE)
_END = re.compile(r"[.!?](?=\s)|\n|\\[])]|\$")
_SENTENCE = re.compile(r"[.!?](?=\s)|\n")
# between the candidates of a list, or between the operands of a calculation
_JOINT = re.compile(
    r"(?:[\s,;/&+*^()|{}$\\.-]|\N{MULTIPLICATION SIGN}|\N{DIVISION SIGN}|\b(?:and|or|to|times|plus|minus|[a-z])\b)*"
)
_NEXT_ITEM = re.compile(r"\s*(?:[^\W\d]+\s+)?[^\W\d]*\s*(?:[,;/|\n-]|\N{EN DASH}|\\to\b|\([a-e]\))\s*(?:and\s+)?")
_SAME_UNIT = re.compile(  # `5 km and 6 km`
    r"\s*([^\W\d]+)\s*(?:and|to|until|\(?[a-e]\)|-|\N{EN DASH}|\\to|\\text|[ {}])*\s*"
)
_LAST_ITEM = re.compile(r"\s*(?:[^\W\d]+\s*){0,2}\W*")


def reserved(text: str) -> bool:
    """Returns whether the text negates or conditions what it says, or offers alternatives."""
    return _RESERVED.search(text) is not None


def find_answer(response: str, expected: str) -> str | None:
    """Returns the answer in a response; None if there is none or if it is hedged.

    The answer is in <answer> tags or \\boxed{}, else in a `####` line. Without any of them, the answer is the last
    number and the words after it if a number is expected. Otherwise it is the text after "the answer is", else the last
    formula, else the whole response.
    """
    text = response.rpartition("</think>")[2].replace("\N{MINUS SIGN}", "-")
    marks = _marks(text)
    if marks:
        start, end = marks[-1]
        before = _MARK_BEFORE.sub("", text[:start])
        after = _MARK_AFTER.sub("", text[end:])
        hedged = is_hedged(_CLAUSE.split(before)[-1], after)
        operand = _OPERAND_AFTER.search(text[:start]) or _OPERAND_BEFORE.match(after)
        contradicting = len({_plain(text[start:end]) for start, end in marks}) > 1
        if hedged or operand or contradicting:
            return None
        text = text[start:end].strip()
    if parse_quantity(normalized(expected)) is not None:
        return text if marks and "\n" not in text else last_number(text)
    stated = list(_STATED.finditer(text))
    if stated:
        hedged = is_hedged(_sentence(text, stated[-1].start(1)), "")
        contradicting = len({_plain(match[1]) for match in stated}) > 1
        return None if hedged or contradicting else stated[-1][1].strip()
    formulas = [] if marks else list(_FORMULA.finditer(text))
    if not formulas or formulas[-1][0] == text.strip():
        return text.strip()
    return _last(text, formulas)


def last_number(text: str) -> str | None:
    """Returns the last number of a statement without reservations, with the words that follow it; None without one.

    There is none either if several answers are stated.
    """
    stated = {_plain(amounts[-1]) for match in _STATED.finditer(text) if (amounts := NUMBER.findall(match[1]))}
    numbers = list(NUMBER.finditer(text))
    return _last(text, numbers) if numbers and len(stated) < 2 else None


def _last(text: str, matches: list[re.Match[str]]) -> str | None:
    last = matches[-1]
    before, after = _sentence(text, last.start()), text[last.end() :]
    if is_hedged(before, after) or reserved(after):
        return None
    if last.re is NUMBER and re.fullmatch(r"[-+*/().,\d\s$]*=[\s$]*", before):
        return (before + last[0]).replace("$", "")  # an equation, which may be false
    if len(matches) > 1 and matches[-2][0] != last[0]:
        between = text[matches[-2].end() : last.start()]
        unit = _SAME_UNIT.fullmatch(between)
        if unit is not None and after.lstrip().startswith(unit[1]):
            return None
        if _JOINT.fullmatch(between) or (_NEXT_ITEM.fullmatch(between) and _LAST_ITEM.fullmatch(after)):
            return None
    if last.re is _FORMULA:
        return last[0]
    currency = re.search(r"[$\N{EURO SIGN}\N{POUND SIGN}]\s*$", before)
    return (currency[0] if currency else "") + last[0] + _END.split(after)[0]


def _sentence(text: str, end: int) -> str:
    """Returns the sentence that contains `end`, up to there."""
    return text[max((match.end() for match in _SENTENCE.finditer(text, 0, end)), default=0) : end]


def _marks(text: str) -> list[tuple[int, int]]:
    """Returns where marked answers are: tags and boxes, the box inside of a tag for the tag; else `####` lines."""
    boxes = _boxes(text)
    tags = [match.span(1) for match in _TAGGED.finditer(text)]
    bare = [(start, end) for start, end in tags if not any(start <= inner and outer <= end for inner, outer in boxes)]
    hashes = [match.span(1) for match in _HASHES.finditer(text)]
    return [(start, end) for start, end in sorted(boxes + bare) or hashes if text[start:end].strip()]


def boxed(text: str) -> list[str]:
    """Returns the contents of all \\boxed{...}."""
    return [text[start:end] for start, end in _boxes(text)]


def _boxes(text: str) -> list[tuple[int, int]]:
    """Returns where the contents of \\boxed{...} are, braces balanced; of nested ones the outer."""
    spans: list[tuple[int, int]] = []
    opened: list[re.Match[str]] = []
    for token in _BRACE.finditer(text):
        if token[0] != "}":
            opened.append(token)
        elif opened and len((opening := opened.pop())[0]) > 1:
            while spans and spans[-1][0] > opening.start():
                spans.pop()
            spans.append((opening.end(), token.start()))
    return spans


def is_inexact(text: str) -> bool:
    """Returns whether words after a number bound or approximate it."""
    return _INEXACT_WORD.search(text) is not None


def is_hedged(before: str, after: str) -> bool:
    """Returns whether the text before an answer, or the words directly after it, take it back or offer another one."""
    return reserved(before) or _BEFORE.search(before) is not None or _AFTER.match(after) is not None


def _plain(text: str) -> object:
    """Returns what is equal in equal answers: the value of a number, else the text."""
    plain = normalized(text)
    quantity = parse_quantity(plain)
    return plain if quantity is None else (quantity.number, quantity.unit)
