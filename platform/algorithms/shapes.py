"""Shapes of tensors in the signatures of this package: B rows of T positions.

Modules import these names for type checkers only, because importing jaxtyping takes 10 ms. Tests check them at each
call (tests/shapes.py).
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["BoolB", "BoolBT", "FloatB", "FloatBT", "IntB"]

FloatBT = Float[Tensor, "batch seq"]
BoolBT = Bool[Tensor, "batch seq"]
FloatB = Float[Tensor, " batch"]
BoolB = Bool[Tensor, " batch"]
IntB = Int[Tensor, " batch"]
