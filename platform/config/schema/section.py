"""The base class of all config sections: closed, frozen, with documented fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Value = TypeVar("Value")
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, in which `~` stands for the home folder."""


class Unreadable(Exception):
    """A rule read a key whose value is wrong. No loaded config has such keys."""


class Section(BaseModel):
    """A YAML mapping. Unknown keys are errors, values never change after loading, numbers are never silently coerced.

    Strict means: a whole number is taken where a float is declared, but text, booleans and 8.0 are no whole numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)

    def changed(self, values: Mapping[str, object]) -> Self:
        """Returns a copy with other values at these dotted keys, which are not checked."""
        update: dict[str, Any] = {}
        for key, value in values.items():
            name, _, inside = key.partition(".")
            section = update.get(name, getattr(self, name))
            update[name] = section.changed({inside: value}) if inside else value
        return self.model_copy(update=update)

    if not TYPE_CHECKING:  # mypy would allow every name

        def __getattr__(self, name: str) -> object:
            if name in type(self).model_fields:
                raise Unreadable(name)
            return super().__getattr__(name)


def key(default: Value, description: str, **limits: Any) -> Value:
    """Returns the field of a key with a default. `limits` are those of pydantic's `Field`, as `ge` and `min_length`."""
    field: Value = Field(default=default, description=description, **limits)
    return field
