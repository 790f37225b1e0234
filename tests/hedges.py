"""Generates hedged answers: each contains the expected answer and does not commit to it."""

from __future__ import annotations

import random
from collections.abc import Iterator

# {a}: the expected answer. {b}, {c}: others.
CANDIDATES = (
    "{a} or {b}", "{b} or {a}", "either {a} or {b}", "Either {b} or {a}.", "{a}, {b}", "{b}, {a}", "{b}, {c}, {a}",
    "{a}; {b}", "{b} / {a} / {c}", "{a} and {b}", "{b} and {a}", "{b} and/or {a}", "{a} (or {b})",
    "{b}, or perhaps {a}",
    "The answer is {a} or {b}.", "The answer is {b} or {a}.", "It is {b} or {a}, I am not sure.", "{b}\n{c}\n{a}",
    "The answer is {b}. The answer is {a}.", "The answer is {a}. No, the answer is {b}.", "Candidates: {b}, {c}, {a}",
    "One of {b}, {c}, {a}.", "It could be {b}. It could also be {a}.", "If it is not {b}, it is {a}.", "{b} | {a}",
    "Possible answers: {b}, {a}.", "{a}? {b}? {c}?", "I would say {b}, alternatively {a}.", "{b}, else {a}",
)  # fmt: skip
DENIALS = (
    "It is not {a}.", "not {a}", "The answer is not {a}.", "The answer isn't {a}.", "It can't be {a}.", "Never {a}.",
    "I doubt that it is {a}.", "It is false that the answer is {a}.", "{a} is wrong.", "{a} is not the answer.",
    "Anything but {a}.", "Neither {b} nor {a}.", "{a}? No.", "The wrong answer is {a}.", "It cannot be {a}.",
    "All numbers except {a}.", "Any number other than {a}.", "It is not the case that it equals {a}.", "{a}, or not.",
)  # fmt: skip
DOUBTS = (
    "approximately {a}", "about {a}", "The answer is about {a}.", "roughly {a}", "around {a}", "It is nearly {a}.",
    "almost {a}", "maybe {a}", "Perhaps {a}.", "possibly {a}", "It might be {a}.", "It could be {a}.", "It may be {a}.",
    "My guess is {a}.", "Probably {a}.", "{a}?", "Is it {a}?", "close to {a}", "at least {a}", "at most {a}",
    "more than {a}", "less than {a}", "up to {a}", "{a} if x > 0", "{a} unless x = 0", "{a} if it is even, else {b}",
    "If it is even, {b}, otherwise {a}.", "It depends: {b} or {a}.", "{a}, assuming that x > 0", "{a} or so",
    "~{a}", "{a}, provided that x > 0", "I am uncertain: {a}", "{a} at most", "I would guess {a}.",
)  # fmt: skip
MIXED = (
    "I'm torn between {b} and {a}.", "Could be either one: {b}, {a}", "\\boxed{{{b}\\text{{ or }}{a}}}",
    "\\boxed{{{a}\\text{{ (or }}{b})}}", "\\boxed{{{b}/{a}}}", "\\boxed{{{a}; {b}}}", "\\boxed{{{a} \\quad {b}}}",
    "\\boxed{{{a}\\\\{b}}}", "\\boxed{{x={b} \\lor x={a}}}", "\\boxed{{x={b}, y={a}}}",
    "<answer>{b}</answer>\n<answer>{a}</answer>", "<answer>{b}\n{a}</answer>", "First guess: {b}. Second guess: {a}",
    "Option A: {b}\nOption B: {a}", "(a) {b} (b) {a}", "{a} is incorrect", "{a} would be wrong",
    "It's not true that the answer is {a}", "Certainly not {a}", "The answer differs from {a}",
    "The answer is unlikely to be {a}", "no idea, {a}?", "\\boxed{{\\text{{probably }}{a}}}", "\\boxed{{{a}?}}",
    "\\boxed{{\\ge {a}}}", "\\boxed{{\\geq {a}}}", "\\boxed{{<{a}}}", "\\boxed{{{a}+}}", "\\boxed{{{a}-ish}}",
    "\\boxed{{\\pm {a}}}", "\\boxed{{{a}\\pm{b}}}", "\\boxed{{\\max({a},{b})}}",
    "\\boxed{{{a}\\ne{b}}}", "\\boxed{{{b}\\to{a}}}", "\\boxed{{\\text{{between }}{b}\\text{{ and }}{a}}}",
    "between {b} and {a}", "somewhere near {a}", "{b} to {a}", "{b} - {a}", "from {b} up to {a}",
    "either {b}, or else {a}", "Answer 1: {b}. Answer 2: {a}.", "The answer is {b}, no wait, {a}",
    "\\boxed{{{b}}}, \\boxed{{{a}}}", "\\boxed{{{b}}}. Alternatively, \\boxed{{{a}}}.",
    "\\boxed{{{a}}} (not {b}, or is it?)", "#### {b} or {a}", "#### {b}, {a}", "#### maybe {a}", "~{a}",
    "{a}\N{PLUS-MINUS SIGN}1", "\N{ALMOST EQUAL TO}{a}", "\N{GREATER-THAN OR EQUAL TO}{a}", ">{a}", "!{a}",
    "\N{NOT SIGN}{a}", "not({a})", "I don't think it is {a}", "It ain't {a}",
    "The answer isn\N{RIGHT SINGLE QUOTATION MARK}t {a}", "hardly {a}", "far from {a}", "If pressed, {a}",
    "In case x>0: {a}", "when x>0, {a}; when x<0, {b}", "{a} for x>0, {b} for x<0", "{a} provided n is odd",
    "{a} as long as n is odd", "suppose it is {a}", "let us say {a}", "a guess: {a}",
)  # fmt: skip
FRAMES = (
    "{hedge}", "\\boxed{{{hedge}}}", "<answer>{hedge}</answer>", "#### {hedge}", "Let me think. {hedge}",
    "\\boxed{{\\text{{{hedge}}}}}", "The steps are clear.\n\n{hedge}", "<think>It is {a}.</think> {hedge}",
)  # fmt: skip
MARKS = (
    "\\boxed{{{b}}} \\boxed{{{a}}}", "\\boxed{{{a}}} or \\boxed{{{b}}}",
    "\\boxed{{{a}}} or {b}", "{b} or \\boxed{{{a}}}",
    "<answer>{b}</answer> <answer>{a}</answer>", "#### {b}\n#### {a}", "<answer>{a}</answer> \\boxed{{{b}}}",
    "The answer is not \\boxed{{{a}}}.", "\\boxed{{{a}}} is wrong.", "\\boxed{{{a}}}? No.", "Maybe \\boxed{{{a}}}.",
    "\\boxed{{{a}}} if x > 0", "\\boxed{{{a}}}, or {b}", "approximately \\boxed{{{a}}}", "\\boxed{{{a}}} or so",
    "Either \\boxed{{{b}}} or \\boxed{{{a}}}.", "It isn't \\boxed{{{a}}}.", "\\boxed{{\\approx {a}}}",
    "\\boxed{{\\neg {a}}}", "\\boxed{{{a} \\lor {b}}}", "\\boxed{{\\neq {a}}}", "\\boxed{{\\{{{a}, {b}\\}}}}",
    "\\boxed{{({a}, {b})}}", "\\boxed{{[{a}, {b}]}}", "\\boxed{{{a} \\pm 1}}", "\\boxed{{x \\ne {a}}}",
    "\\boxed{{\\sim {a}}}", "\\boxed{{{a}}} \\text{{ or }} \\boxed{{{b}}}", "\\boxed{{{a}}}. Wait, \\boxed{{{b}}}.",
    "At least \\boxed{{{a}}}.", "It might be \\boxed{{{a}}}.", "<answer>\\boxed{{{b}}} \\boxed{{{a}}}</answer>",
)  # fmt: skip


def hedged_answers(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Returns (response, expected answer) pairs."""
    generator = random.Random(seed)
    for _ in range(count):
        a, b, c = _answers(generator)
        if generator.random() < 0.5:
            yield generator.choice(MARKS + MIXED).format(a=a, b=b, c=c), a
            continue
        hedge = generator.choice(generator.choice((CANDIDATES, DENIALS, DOUBTS))).format(a=a, b=b, c=c)
        yield generator.choice(FRAMES).format(hedge=hedge, a=a), a


def _answers(generator: random.Random) -> list[str]:
    """Three different answers of one type."""
    number = generator.sample(range(2, 500), 3)
    kind = generator.choice(("integer", "integer", "integer", "decimal", "fraction", "unit", "formula", "word", "time"))
    unit = generator.choice(("km", "hours", "apples"))
    words = generator.sample(("blue", "Paris", "seven", "oxygen", "Friday", "Anna", "north", "copper"), 3)
    return {
        "integer": [str(value) for value in number],
        "decimal": [f"{value / 8}" for value in number],
        "fraction": [f"{value}/{501}" for value in number],
        "unit": [f"{value} {unit}" for value in number],
        "formula": [f"{value}x + 1" for value in number],
        "word": words,
        "time": [f"{value % 12 + 1}:{10 + value % 50}" for value in number],
    }[kind]
