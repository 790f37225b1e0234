"""Products of bfloat16 rows with float32 results, for processors with AVX512-BF16.

An instruction multiplies 32 pairs of bfloat16 numbers and adds them to 16 float32 sums. A block of 4 rows of both
factors has 256 such sums in registers, so a loaded vector is used four times. The weights are read in place, once for
all rows. A number is computed by one thread in a fixed order. Products whose sums run over rows are not covered.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import llvmlite.binding
import numba
import torch
from llvmlite import ir
from numba import carray
from numba.extending import intrinsic
from torch import Tensor

from rl_platform.accel.openmp_team import has_team, run_by_team
from rl_platform.accel.tensor_loops import address_of, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numba.core.base import BaseContext

    Values = Sequence[ir.Value]

llvmlite.binding.initialize_native_asmparser()  # for inline assembly
BLOCK = 4  # rows of a factor that are multiplied together
SPAN = 64  # weight rows that a thread takes at a time
LINE = 64  # bytes of a vector
INT32, INT64, FLOAT32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
PAIRS, SUMS, OUTPUTS = ir.VectorType(INT32, 16), ir.VectorType(FLOAT32, 16), ir.VectorType(FLOAT32, BLOCK)


def covers(left: Tensor, right: Tensor, out: Tensor) -> bool:
    """Returns whether `dot` computes left @ right.T on this processor."""
    whole = left.is_contiguous() and right.is_contiguous() and out.is_contiguous()
    sizes = left.shape[1] % (LINE // 2) == 0 and right.shape[0] % BLOCK == 0
    return whole and sizes and has_team() and bool(torch.cpu._is_avx512_bf16_supported())


def dot(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """Writes left @ right.T to `out` [M,N] float32, or adds it; returns `out`. left [M,K], right [N,K] bfloat16."""
    call = _DotArguments(
        rows=len(left),
        outputs=len(right),
        size=left.shape[1] * left.itemsize,
        add=add,
        states=left.data_ptr(),
        weights=right.data_ptr(),
        out=out.data_ptr(),
    )
    run_by_team(_address(), ctypes.addressof(call), torch.get_num_threads())
    return out


class _DotArguments(ctypes.Structure):
    """started: the counter of spans. size: bytes of a row of both factors. Other int64 fields: sizes and addresses."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("started", "rows", "outputs", "size", "add", "states", "weights", "out")
    )


@cache
def _address() -> int:
    return address_of(_dot, _DotArguments)


def _block(rows: int, *, add: bool) -> Callable[..., None]:
    """Returns `block(states, weights, size, out, step, ahead)`: products of `rows` states and BLOCK weight rows.

    Arguments are int64: addresses, bytes of a row of the factors, bytes of a row of the results, and an address whose
    next `size` bytes are prefetched.
    """

    @intrinsic
    def block(
        _context: object, _states: object, _weights: object, _size: object, _out: object, _step: object, _ahead: object
    ) -> tuple[object, Callable[..., ir.Value]]:
        def generate(context: BaseContext, builder: ir.IRBuilder, _: object, arguments: Values) -> ir.Value:
            states, weights, size, out, step, ahead = arguments
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            multiply = ir.FunctionType(SUMS, [PAIRS, PAIRS, SUMS])
            before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()

            builder.branch(loop)
            builder.position_at_end(loop)
            place = builder.phi(INT64)
            sums = [[builder.phi(SUMS) for _ in range(BLOCK)] for _ in range(rows)]
            left, right = (
                [_load(builder, first, number, size, place) for number in range(count)]
                for first, count in ((states, rows), (weights, BLOCK))
            )
            near = builder.inttoptr(builder.add(ahead, place), byte)
            builder.call(prefetch, [near, INT32(0), INT32(3), INT32(1)])
            following = builder.add(place, INT64(LINE))
            place.add_incoming(INT64(0), before)
            place.add_incoming(following, loop)
            totals = []
            for state, row in zip(left, sums, strict=True):
                totals.append([])
                for weight, total in zip(right, row, strict=True):
                    # total += state * weight, of neighbouring pairs
                    more = builder.asm(multiply, "vdpbf16ps $2, $1, $0", "=v,v,v,0", [state, weight, total], False)
                    total.add_incoming(SUMS([0.0] * 16), before)
                    total.add_incoming(more, loop)
                    totals[-1].append(more)
            builder.cbranch(builder.icmp_signed("<", following, size), loop, after)

            builder.position_at_end(after)
            for number, row in enumerate(totals):
                result = _summed(builder, *row)
                address = builder.add(out, builder.mul(step, INT64(number)))
                target = builder.inttoptr(address, OUTPUTS.as_pointer())
                if add:
                    result = builder.fadd(result, builder.load(target, align=4))
                builder.store(result, target, align=4)
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 6), generate

    return block


def _load(builder: ir.IRBuilder, first: ir.Value, number: int, size: ir.Value, place: ir.Value) -> ir.Value:
    address = builder.add(builder.add(first, builder.mul(size, INT64(number))), place)
    return builder.load(builder.inttoptr(address, PAIRS.as_pointer()), align=2)


def _summed(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value, d: ir.Value) -> ir.Value:
    """Four vectors of 16 -> the vector of their four sums."""
    groups = range(0, 16, 4)

    def picked(x: ir.Value, y: ir.Value, places: Sequence[int]) -> ir.Value:
        return builder.shuffle_vector(x, y, ir.VectorType(INT32, len(places))(list(places)))

    def added(x: ir.Value, y: ir.Value, low: Sequence[int], high: Sequence[int]) -> ir.Value:
        return builder.fadd(*(picked(x, y, [g + place for g in groups for place in half]) for half in (low, high)))

    pairs = [added(x, y, (0, 16, 1, 17), (2, 18, 3, 19)) for x, y in ((a, b), (c, d))]
    whole = added(*pairs, (0, 1, 16, 17), (2, 3, 18, 19))
    for half in (8, 4):
        whole = builder.fadd(*(picked(whole, whole, range(start, start + half)) for start in (0, half)))
    return whole


_set_rows, _set_row = _block(BLOCK, add=False), _block(1, add=False)
_add_rows, _add_row = _block(BLOCK, add=True), _block(1, add=True)


def _dot(pointer: object) -> None:
    """The function that each thread runs."""
    call = carray(pointer, 1)[0]
    size, step, together = call.size, 4 * call.outputs, call.rows - call.rows % BLOCK
    span = taken(pointer)
    while span * SPAN < call.outputs:
        for output in range(span * SPAN, min(span * SPAN + SPAN, call.outputs), BLOCK):
            weights, out = call.weights + output * size, call.out + 4 * output
            for row in range(0, together, BLOCK):
                ahead = weights + (BLOCK + row // BLOCK % BLOCK) * size  # of the next weight rows
                if call.add:
                    _add_rows(call.states + row * size, weights, size, out + row * step, step, ahead)
                else:
                    _set_rows(call.states + row * size, weights, size, out + row * step, step, ahead)
            for row in range(together, call.rows):
                ahead = weights + (BLOCK + row % BLOCK) * size
                if call.add:
                    _add_row(call.states + row * size, weights, size, out + row * step, step, ahead)
                else:
                    _set_row(call.states + row * size, weights, size, out + row * step, step, ahead)
        span = taken(pointer)
