"""The base class of all config sections: closed, frozen, with documented fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A YAML mapping. Unknown keys are errors, values never change after loading, numbers are never silently coerced.

    Strict means: a whole number is taken where a float is declared, but text, booleans and 8.0 are no whole numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
