"""The outcome of one foreign key, and the conversions that several systems share.

A table maps a foreign key, or a pattern with `*`, to one of our keys or to a `Rule`. A rule is a function of the key's
value and of the whole foreign config; it returns an `Outcome`. A rule raises TypeError or ValueError for a value that
its key cannot have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Status = Literal["translated", "same", "passed", "untranslated"]
Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Unresolved:
    """A value that the file does not say, such as the output of a command in a shell script."""

    text: str
    why: str

    def __str__(self) -> str:
        return self.text


# A value of a foreign config, or of ours.
Value: TypeAlias = "Scalar | Unresolved | Sequence[Value] | Mapping[str, Value]"


@dataclass(frozen=True)
class Outcome:
    """translated: `values` (our keys) are written; same: it is so here without a key; untranslated: `why` not.

    passed: `values` are arguments of code that the user has to write, so their meaning is up to that code.

    An untranslated key may still write the nearest `values`. `into`: our key that another rule writes from this one.
    """

    status: Status
    values: Mapping[str, Value] = field(default_factory=dict)
    why: str = ""
    into: str = ""


def number(value: Value) -> int | float:
    """Returns the value. Raises TypeError if it is not a number."""
    if not isinstance(value, int | float):
        raise TypeError(f"{value} is not a number")
    return value


def whole(value: Value) -> int:
    """Returns a whole number, that a script may hold as text."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"{value} is not a number")
    return int(value)


def texts(value: Value) -> list[str]:
    """Returns the texts of a list, of a single value, or of null: none."""
    return [] if value is None else [str(each) for each in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class ForeignConfig:
    """A foreign config: the keys of the file, and the system's defaults of those that it does not name."""

    given: Mapping[str, Value]
    defaults: Mapping[str, Value] = field(default_factory=dict)

    def __call__(self, key: str) -> Value:
        """Returns the value of `key`: that of the file if it says one, else the system's default, else None."""
        value = self.given.get(key)
        if key not in self.given or isinstance(value, Unresolved):
            return self.defaults.get(key)
        return value

    def number(self, key: str, default: float | None = None) -> int | float:
        """Returns the value of `key`, or `default` for null. Raises TypeError for a value that is no number."""
        value = self(key)
        return number(default if value is None else value)

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns the value of `key`, or `default` for null and 0. Raises TypeError or ValueError."""
        return whole(self(key) or default)

    def positive(self, key: str) -> int | float | None:
        """Returns the value of `key`, or None if it is null or not above 0."""
        value = self(key)
        return number(value) if value and number(value) > 0 else None


Rule = Callable[[Value, ForeignConfig], Outcome]


@dataclass(frozen=True)
class Named:
    """The rule of a pattern that depends on the key."""

    rule: Callable[[str], Rule]


Table = dict[str, str | Rule | Named]


def write(values: Mapping[str, Value], why: str = "") -> Outcome:
    """Returns the outcome that writes these values to our keys."""
    return Outcome("translated", values, why)


def same(why: str) -> Outcome:
    """Returns the outcome of a key that needs no counterpart. why: the platform does the same."""
    return Outcome("same", why=why)


def untranslated(why: str, values: Mapping[str, Value] | None = None) -> Outcome:
    """Returns the outcome of a key without a counterpart. values: written in its place."""
    return Outcome("untranslated", values or {}, why)


def passed(key: str, value: Value, why: str) -> Outcome:
    """Writes an argument of code that the user has to write."""
    return Outcome("passed", {key: value}, why)


def part_of(key: str, why: str = "") -> Outcome:
    """The value is contained in `key`, which the rule of another foreign key writes."""
    return Outcome("translated", why=why, into=key)


def unknown(value: Value, names: Iterable[Scalar]) -> Outcome:
    """Returns the outcome of a value without a counterpart. names: the values that have one."""
    return untranslated(f"{value} has no counterpart; known: {', '.join(map(str, names))}")


def shared_gpus(learners: Sequence[str], gpus: int, per_engine: int) -> dict[str, Value]:
    """Returns the placement of components that share all GPUs; an engine owns `per_engine` of them."""
    if per_engine == 1:
        return {",".join([*learners, "rollout", "reward"]): "all"}
    last = gpus // per_engine - 1
    return {",".join([*learners, "reward"]): "all", "rollout": f"0-{gpus - 1}:{f'0-{last}' if last > 0 else 0}"}


def to(*keys: str, why: str = "") -> Rule:
    """Writes the value as it is to one or more keys. null there means off or unset, as here."""
    return lambda value, _: same("not set") if value is None else write(dict.fromkeys(keys, value), why)


def contained(key: str, why: str = "") -> Rule:
    """Returns the rule of a value that is contained in our `key`, which another rule writes."""
    return lambda value, _: same("not set") if value is None else part_of(key, why)


def choice(
    keys: str | Sequence[str], names: Mapping[Scalar, Scalar] | Mapping[Scalar, str] | Mapping[str, str], why: str = ""
) -> Rule:
    """Writes the counterpart of a value to each of `keys`."""
    keys = [keys] if isinstance(keys, str) else keys
    ours: dict[Scalar, Value] = dict(names.items())

    def rule(value: Value, _: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        if not isinstance(value, str | int | float) or value not in ours:
            return unknown(value, ours)
        return write(dict.fromkeys(keys, ours[value]), why)

    return rule


def only(*values: Value, why: str, otherwise: str) -> Rule:
    """The same here for some values; the others cannot be expressed."""
    return lambda value, _: same(why) if any(value == each for each in values) else untranslated(otherwise)


def off(otherwise: str) -> Rule:
    """A feature that this platform lacks: fine while it is off."""
    return only(None, False, 0, "", [], {}, "none", why="off there", otherwise=otherwise)


def detail(why: str) -> Rule:
    """A detail of the other system whose value changes no result, or that this platform derives."""
    return lambda *_: same(why)


def lacking(why: str) -> Rule:
    """Returns the rule of a key that has no counterpart, whatever its value."""
    return lambda *_: untranslated(why)


def times(key: str, factor: Callable[[ForeignConfig], Value], why: str) -> Rule:
    """Writes the product of the value and a number of the config."""

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        other = factor(source)
        if not isinstance(other, int | float) or not isinstance(value, int | float):
            return untranslated(f"{why}, which the file does not say")
        return write({key: value * other}, why)

    return rule


def while_(condition: Callable[[ForeignConfig], bool], rule: str | Rule, otherwise: str) -> Rule:
    """Applies `rule` while the other keys make the system read this one."""
    applied = to(rule) if isinstance(rule, str) else rule
    return lambda value, source: applied(value, source) if condition(source) else same(otherwise)


def dtype(key: str) -> Rule:
    """The floating-point type of a model."""
    return choice(key, _DTYPES)


def interval(key: str) -> Rule:
    """Steps between two events. Other systems write -1 or null for never, this platform 0 for only at the end."""
    return lambda value, _: write({key: value if isinstance(value, int) and value > 0 else 0})


def top_k(key: str) -> Rule:
    """The k of top-k sampling: null, -1, 0 and more than any vocabulary mean off."""
    return lambda value, _: write({key: value if isinstance(value, int) and 0 < value < 1_000_000 else 0})


def sampled(name: str, validates: Callable[[ForeignConfig], bool]) -> Rule:
    """A setting of sampling. validates: whether the system validates with it, too."""

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value is None and name != "top_k":
            return same("not set")
        sections = ("sampling", "val_sampling") if validates(source) else ("sampling",)
        given = top_k("value")(value, source).values["value"] if name == "top_k" else value
        return write({f"rollout.{section}.{name}": given for section in sections})

    return rule


def loggers(value: Value, _: ForeignConfig) -> Outcome:
    """Writes the names of loggers."""
    names = value if isinstance(value, list) else [value]
    kept = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    if value in ("all",):
        return untranslated("all installed loggers there; a list here")
    if lost := [str(name) for name in names if name not in (*kept, "console", "none", "file", None)]:
        return untranslated(f"there is no logger {', '.join(lost)}", {"runner.logger_backends": kept})
    return write({"runner.logger_backends": kept}, "the terminal and metrics.jsonl always log")


_DTYPES: dict[Scalar, str] = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32", "32", 32), "float32"),
}
NO_STEPS = "runner.max_epochs ends the run; the file does not say how many steps that is"
MANY_STEPS = 1_000_000  # where only a number of epochs ends a run
# What several tables say; `<engine>` there
REASONS = {
    "engine": "a setting of its engine or kernels; results do not depend on it",
    "architecture": "read from the model's config.json",
    "profiler": "its profiler; timelines here: runner.trace_steps",
    "episode_reward": "a factor or filter of the environment's rewards; wrap the environment",
    "trusted": "code of a model is never run; its family is built in",
    "no_float16": "float16 is not supported: bfloat16 or float32",
    "adamw": "AdamW is the only optimizer",
    "own_reward": "its arguments differ: adapt it as in docs/reasoning.md, then reward.type: MODULE:FUNCTION",
    "scoring": "verl selects the scoring function by the column data_source; math_verify compares with the answer",
    "packed": "sequences are packed without padding",
}
