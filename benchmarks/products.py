"""Speed of the matrix products of bfloat16 training and of the generator's LM head, on one thread.

Sides, for the sizes of SmolLM2-135M: float32; bfloat16 factors with float32 results, by MKL with AMX and by
`accel/dot_kernel.py` without; torch's own product, which rounds its results; float32 and bfloat16 with weights in
oneDNN's packed layout, as in the generator. The sides take turns on the same tensors, and results are
compared before they are timed. Not covered: the rest of a layer.

    python benchmarks/products.py [--rounds 20] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from _common import machine, new_parser, write_json
from torch import Tensor, nn

from rl_platform.accel.bfloat16_products import product
from rl_platform.accel.packed_linear import PackedLinear, can_pack

SIZES = ((700, 576, 3072), (700, 1536, 576), (350, 576, 49152), (16, 576, 49152), (64, 576, 49152))
SIDES = ("float32", "bfloat16 to float32", "torch, bfloat16", "packed float32", "packed bfloat16")


def main() -> None:
    parser = new_parser(__doc__, rounds=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else options.rounds
    seconds = {size: measured(size, rounds) for size in SIZES}
    print(
        f"{'rows, inputs, outputs':24}" + "".join(f"{side:>28}" for side in SIDES) + "   GFLOP/s, median of the turns"
    )
    for (rows, inputs, outputs), of_side in seconds.items():
        work = 2e-9 * rows * inputs * outputs
        rates = (f"{work / statistics.median(of_side[side]):.0f}" if side in of_side else "-" for side in SIDES)
        print(f"{f'{rows}, {inputs}, {outputs}':24}" + "".join(f"{rate:>28}" for rate in rates))
    found = {str(size): of_side for size, of_side in seconds.items()}
    write_json(options.json, {"machine": machine(["torch"]), "options": vars(options), "seconds": found})


@torch.no_grad()
def measured(size: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """Seconds of every turn, by side. oneDNN packs bfloat16 only on processors with AVX-512."""
    count, inputs, outputs = size
    numbers = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*shape, generator=numbers) for shape in ((count, inputs), (outputs, inputs)))
    half_rows, half_weight = rows.bfloat16(), weight.bfloat16()
    out = torch.empty(count, outputs)
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.data = weight
    packed = PackedLinear([layer], torch.float32)
    sides: dict[str, Callable[[], Tensor]] = {
        SIDES[0]: lambda: torch.mm(rows, weight.t(), out=out),
        SIDES[1]: lambda: product(half_rows, half_weight.t(), out, exact=True),
        SIDES[2]: lambda: torch.mm(half_rows, half_weight.t()),
        SIDES[3]: lambda: packed(rows),
    }
    if can_pack(torch.device("cpu"), torch.bfloat16):
        half_packed = PackedLinear([layer], torch.bfloat16)
        sides[SIDES[4]] = lambda: half_packed(half_rows)
    exact = rows @ weight.t()
    for side in sides.values():
        torch.testing.assert_close(side().float(), exact, rtol=0.02, atol=0.02 * inputs**0.5)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
