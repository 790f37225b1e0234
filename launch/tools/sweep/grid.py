"""The points of a sweep: every combination of the values that the command line lists.

`runner.seed=1,2,3` lists three values, `a=[1,2],[3,4]` two. Points that differ only in `runner.seed` form a group.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import yaml

from rl_platform.config.overrides import key_of
from rl_platform.config.source import COMMAND_LINE, CoreLoader
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.run_groups import SEED, short_names

MOST_POINTS = 1000
RESERVED = {
    "runner.output_dir": "each point has a folder of its own in that of the sweep: --output FOLDER",
    "runner.resume": "a sweep continues its unfinished points and skips finished ones",
}
_PLAIN = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_LONGEST_NAME = 150  # characters of a folder


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep. name: that of its folder. values: texts of the varied keys, as the command line has them.

    group: name of the points that differ from it in the seed; label: the same for a table.
    """

    name: str
    group: str
    label: str
    values: dict[str, str] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={text}" for key, text in self.values.items()]


@dataclass(frozen=True)
class Varied:
    """The arguments of a sweep: overrides of all points, and the texts of the values of each varied key."""

    fixed: list[str]
    axes: dict[str, list[str]]

    @property
    def size(self) -> int:
        return math.prod(len(texts) for texts in self.axes.values())

    def points(self) -> list[SweepPoint]:
        """Returns all combinations, the seed varying fastest."""
        keys = sorted(self.axes, key=lambda key: key == SEED)
        labels = short_names(keys)
        points = []
        for texts in product(*(self.axes[key] for key in keys)):
            values = dict(zip(keys, texts, strict=True))
            parts = {key: f"{labels[key]}={_safe(text)}" for key, text in values.items()}
            group = _short(",".join(part for key, part in parts.items() if key != SEED))
            seed = [parts[SEED]] if SEED in parts else []
            points.append(SweepPoint(",".join([*filter(None, [group]), *seed]), group, group or "all points", values))
        return points


def read_arguments(arguments: Sequence[str]) -> Varied:
    """Splits arguments into fixed and varied ones. Raises ConfigError with the problems of all."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    problems = []
    for text in arguments:
        key, equals, value = key_of(text), *text.partition("=")[1:]
        if not equals and not text.startswith("~"):
            message, hint = "is neither KEY=VALUE nor ~KEY", "separate several values by commas: runner.seed=1,2,3"
            problems.append(Problem(text, message, where=COMMAND_LINE, hint=hint))
            continue
        try:
            texts = values_of(value)
        except yaml.YAMLError:
            message = "the values cannot be told apart: they are separated by commas, as in a list of YAML"
            hint = 'quote a text that holds a comma, a bracket or a reference: \'key="a,b","c,d"\''
            problems.append(Problem(key, message, where=COMMAND_LINE, value=text, hint=hint))
            continue
        if key in RESERVED:
            problems.append(Problem(key, f"cannot be set: {RESERVED[key]}", where=COMMAND_LINE, value=text))
        elif len(texts) < 2:
            fixed.append(text)
        elif key in axes:
            problems.append(
                Problem(key, "is varied twice", where=COMMAND_LINE, value=text, hint="list all values once")
            )
        else:
            axes[key] = texts
            if repeated := [each for number, each in enumerate(texts) if each in texts[:number]]:
                problems.append(Problem(key, f"{repeated[0]} is listed twice", where=COMMAND_LINE, value=text))
    problems += [
        Problem(key, "is varied and set to one value", where=COMMAND_LINE, value=text, hint="remove one of the two")
        for text in fixed
        if (key := key_of(text)) in axes
    ]
    varied = Varied(fixed, axes)
    if varied.size > MOST_POINTS:
        counts = " x ".join(f"{len(texts)} {key}" for key, texts in axes.items())
        message = f"{varied.size:,} points ({counts})"
        hint = "list fewer values, or search with --optuna"
        problems.append(Problem("sweep", message, where=COMMAND_LINE, allowed=f"at most {MOST_POINTS:,}", hint=hint))
    if problems:
        raise ConfigError(problems)
    return varied


def values_of(text: str) -> list[str]:
    """Returns the texts between the commas outside of brackets, braces and quotes.

    Raises YAMLError if the text has a comma and is no list of YAML values.
    """
    if "," not in text:
        return [text]
    inside = f"[{text}]"
    node = yaml.compose(inside, Loader=CoreLoader)
    assert isinstance(node, yaml.SequenceNode)
    return [inside[item.start_mark.index : item.end_mark.index].strip() for item in node.value]


def _safe(text: str) -> str:
    """Returns a text for a folder's name; with a digest if it is not the text itself, so that texts stay distinct."""
    if _PLAIN.fullmatch(text):
        return text
    return f"{re.sub(r'[^A-Za-z0-9.+]+', '-', text).strip('-')[:24]}-{_digest(text)}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:6]
