"""`section.key=value` and `~section.key` of the command line, laid over the YAML file before anything is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rl_platform.config.layers import Layers
from rl_platform.config.source import COMMAND_LINE, MAX_DEPTH, UNSET, Replacement, YamlReader
from rl_platform.errors import Problem
from rl_platform.suggest import nearest


def apply_overrides(layers: Layers, overrides: Sequence[str], place: str = COMMAND_LINE) -> None:
    """Adds the arguments to `layers` as one more layer, and their problems to `layers.problems`. place: their origin.

    A value is read as YAML and replaces the value or the whole section at the key; `~section.key`, or the value
    `!unset`, removes it. If several arguments set one key, the last one wins, so that a script can append arguments.
    Unknown keys are reported later, with those of the file.
    """
    for text in overrides:
        key, equals, value = _parts(text)
        problem = _malformed(text, key, equals, value, place)
        if problem is None:
            reader = YamlReader(place, numbered=False)
            parsed = reader.read(value, key)
            layers.problems += reader.problems
            if not reader.problems:
                problem = _set(layers, key, parsed, place, dict.fromkeys(reader.where, place))
        if problem is not None:
            layers.problems.append(problem)
    layers.close()


def key_of(text: str) -> str:
    """Returns the key that an argument sets or removes."""
    return _parts(text)[0]


def _parts(text: str) -> tuple[str, str, str]:
    """Returns key, equals sign and value of an argument; of `~key` those of `key=!unset`."""
    key, equals, value = text.partition("=")
    if text.startswith("~") and not equals:
        key, equals, value = text[1:], "=", "!unset"
    return key.strip(), equals, value


def _malformed(text: str, key: str, equals: str, value: str, place: str) -> Problem | None:
    message = hint = ""
    if not equals or not key or "" in key.split("."):
        message, hint = "an override has the form section.key=value", _form(text)
    elif key[0] in "+~-":
        bare = key.lstrip("+~-")
        message, hint = f"no value can be set with `{key[0]}` in front", f"write {bare}=value; ~{bare} removes the key"
    elif not text.isprintable() and not (key.isprintable() and "\0" not in value and _is_unicode(value)):
        return Problem(
            "config",
            "an override contains characters that cannot be printed",
            where=place,
            value=ascii(text)[:80],
            hint='write them as YAML does: "\\t"',
        )
    elif key.count(".") >= MAX_DEPTH:
        message = f"more than {MAX_DEPTH} sections inside each other"
        return Problem("config", message, where=place, value=f"{text[:77]}...")
    elif not value.strip():
        message, hint = "the value is missing", f"~{key} removes the key; {key}=null switches an optional one off"
    return Problem(key or text, message, where=place, value=text, hint=hint) if message else None


def _form(text: str) -> str:
    """Returns what to write instead of an argument without key or equals sign."""
    if text.endswith((".yaml", ".yml")):
        return "a command takes one config, and a file can extend another: extends: FILE"
    if pair := re.fullmatch(r"(\w+(?:\.\w+)+):\s*(\S.*)", text):
        return f"write {pair[1]}={pair[2]}"
    if text == "=":
        return "write it without spaces around the equals sign"
    return "quote it if it contains spaces"


def _is_unicode(text: str) -> bool:
    """Returns True if the bytes of the argument were UTF-8. Others arrive as halves of surrogate pairs."""
    return not any("\ud800" <= mark <= "\udfff" for mark in text)


def _set(layers: Layers, key: str, value: object, place: str, where: dict[str, str]) -> Problem | None:
    *sections, leaf = key.split(".")
    tree, path = layers.tree, ""
    for section in sections:
        path = f"{path}.{section}" if path else section
        if section not in tree or tree[section] is None:
            if value is UNSET:
                return Problem(key, f"there is nothing to remove: {path} is not written", where=place)
            tree[section] = {}
            layers.note({path: place})
        tree = tree[section]
        if not isinstance(tree, dict):
            message = f"{path} is no section, so nothing can be set inside it"
            return Problem(key, message, where=place, value=repr(tree), hint=f"set {path} as a whole")
    if value is UNSET and leaf not in tree:
        close = nearest(leaf, tree)
        hint = f"did you mean {key.removesuffix(leaf)}{close}?" if close else ""
        return Problem(key, f"there is nothing to remove: {path or 'the config'} has no {leaf}", where=place, hint=hint)
    if isinstance(value, Replacement):  # as every value of the command line
        value = dict(value)
    layers.put(tree, leaf, key, value, where)
    layers.note(where)
    return None
