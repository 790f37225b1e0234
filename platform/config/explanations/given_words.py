"""The values that the words of a command line give to options and arguments, for messages about paths.

Not covered: whether they are allowed, which typer checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from rl_platform.config.explanations.refused_paths import named_paths

if TYPE_CHECKING:
    from typer.core import TyperCommand


def named_words(command: TyperCommand, words: Sequence[str], argument: str) -> AbstractContextManager[None]:
    """Returns `named_paths` of the options and arguments that `given_words` yields."""
    return named_paths(partial(given_words, command, words, argument))


def given_words(command: TyperCommand, words: Sequence[str], argument: str = "") -> Iterator[tuple[str, str]]:
    """Yields the options and arguments of a command with their values; KEY=VALUE as a key.

    argument: what messages call the other words; "": the name of the command's first argument, as RUN.
    """
    parameters = command.params
    flags = {name for each in parameters for name in each.opts if getattr(each, "is_flag", False)}
    names = [each.metavar or each.name for each in parameters if each.param_type_name == "argument"]
    argument, option = argument or (names[0] or "" if names else ""), ""
    for word in words:
        name, equals, value = word.partition("=")
        if option:
            yield option, word
            option = ""
        elif word.startswith("-"):
            option = "" if equals or word in flags else word
            if equals:
                yield name, value
        else:
            yield (name, value) if equals else (argument, word)
