"""Parts of compiled loops that read tensors by their address, in float32 or bfloat16, on a CPU.

A loop is a function of one pointer to its arguments. numba has no bfloat16: arrays hold its bits as uint16, `widened`
converts a number to float32, and `rounded` converts it back.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from rl_platform.accel.compiling import ANY_ORDER
from rl_platform.accel.stored_code import StoredCode

if TYPE_CHECKING:
    from numba.core.base import BaseContext

    Values = Sequence[ir.Value]
    Emit = Callable[[BaseContext, ir.IRBuilder, object, Values], ir.Value]

FLOAT, BITS = np.float32, np.uint16
STORED_AS: dict[torch.dtype, type[np.generic]] = {torch.float32: FLOAT, torch.bfloat16: BITS}


def address_of(loop: Callable[[object], None], arguments: type[ctypes.Structure]) -> int:
    """Compiles `loop` for a pointer to `arguments` and returns its address."""
    pointer = numba.types.CPointer(numba.from_dtype(np.dtype(arguments)))
    options = {"error_model": "numpy", "fastmath": set(ANY_ORDER)}
    compiled = CFunc(loop, ((pointer,), numba.types.void), {}, options)
    compiled._cache = StoredCode(loop)
    compiled.compile()
    return int(compiled.address)


@intrinsic
def at(_context: object, _address: object) -> tuple[object, Emit]:
    """Returns a pointer to an address, for `carray`."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _: object, arguments: Values) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(numba.types.voidptr))

    return numba.types.voidptr(numba.types.int64), generate


@intrinsic
def taken(_context: object, pointer: object) -> tuple[object, Emit]:
    """Increments the int64 at an address atomically and returns its old value."""

    def generate(_: BaseContext, builder: ir.IRBuilder, __: object, arguments: Values) -> ir.Value:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return numba.types.int64(pointer), generate


@intrinsic
def prefetch(_context: object, _address: object) -> tuple[object, Emit]:
    """Prefetches memory into the cache; an invalid address has no effect."""

    def generate(context: BaseContext, builder: ir.IRBuilder, _: object, arguments: Values) -> ir.Value:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(fetch, [builder.inttoptr(arguments[0], byte), number(0), number(3), number(1)])  # to read, soon
        return context.get_dummy_value()

    return numba.types.void(numba.types.int64), generate


inlined = numba.njit(inline="always")
_SERIES = tuple(FLOAT(math.log(2) ** k / math.factorial(k)) for k in range(8))


@inlined
def power(x: float) -> float:
    """2^x of x <= 0 up to float32's rounding; of NaN NaN."""
    x = FLOAT(-126) if x < FLOAT(-126) else x  # smaller results are no normal numbers
    whole = np.int32(x - FLOAT(0.5))
    part = x - FLOAT(whole)  # -1/2 to 1/2
    a, b, c, d, e, f, g, h = _SERIES
    fraction = a + part * (b + part * (c + part * (d + part * (e + part * (f + part * (g + part * h))))))
    return fraction * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@intrinsic
def widened(_context: object, number: numba.types.Type) -> tuple[object, Emit]:
    """Returns the float32 of a float32, or of the bits of a bfloat16."""

    def generate(_: BaseContext, builder: ir.IRBuilder, __: object, arguments: Values) -> ir.Value:
        if number == numba.types.float32:
            return arguments[0]
        whole = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(whole, ir.FloatType())

    return numba.types.float32(number), generate


@inlined
def ordered(number: float) -> int:
    """Returns the int32 that is larger if a float32 is larger, and back (`from_ordered`).

    Loops over the largest integer are vectorised; those over the largest float are not, because of NaN.
    """
    bits = FLOAT(number).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def from_ordered(order: int) -> float:
    """Returns the inverse of `ordered`."""
    return np.int32(order ^ ((order >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@inlined
def rounded(number: float) -> int:
    """Returns the bits of the bfloat16 nearest to a float32, even if two are; of NaN NaN."""
    bits = FLOAT(number).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return BITS(near if number == number else np.uint32(0x7FC0))
