"""What every config section shares: closed, frozen, documented fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A YAML mapping. Unknown keys are errors, values never change after loading, numbers are never silently coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
