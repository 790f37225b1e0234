"""SGLang defines triton kernels when it is imported; a CPU engine launches none."""

import hollow


class constexpr:
    def __init__(self, value: object = None) -> None:
        self.value = value


hollow.hollow_out(
    "triton",
    __version__="3.0.0",
    cdiv=lambda a, b: -(-a // b),
    next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
)

import triton.language  # noqa: E402

triton.language.constexpr = constexpr
