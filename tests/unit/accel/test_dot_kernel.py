"""The compiled product of bfloat16 rows equals torch's product of the same numbers in float32."""

from __future__ import annotations

import pytest
import torch

from rl_platform.accel.dot_kernel import covers, dot

if not torch.cpu._is_avx512_bf16_supported():
    pytest.skip("this processor has no AVX512-BF16", allow_module_level=True)


def factors(rows: int, inner: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows + inner + outputs)
    left, right = (torch.randn(count, inner, generator=draw).bfloat16() for count in (rows, outputs))
    return left, right, torch.randn(rows, outputs, generator=draw)


@pytest.mark.parametrize(
    ("rows", "inner", "outputs"), [(1, 32, 4), (3, 96, 64), (5, 576, 196), (16, 64, 132), (37, 160, 68)]
)
def test_products(rows: int, inner: int, outputs: int) -> None:
    left, right, start = factors(rows, inner, outputs)
    assert covers(left, right, start)
    expected = left.float() @ right.float().t()
    torch.testing.assert_close(dot(left, right, torch.full_like(start, torch.nan)), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dot(left, right, start.clone(), add=True), start + expected, rtol=1e-5, atol=1e-4)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, out = factors(9, 64, 512)
    several = dot(left, right, out.clone())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(dot(left, right, out), several)


def test_numbers_that_are_not_finite_stay_in_their_rows() -> None:
    left, right, out = factors(6, 64, 8)
    left[2, 5], right[3, 7] = torch.nan, torch.inf
    dot(left, right, out)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[2], expected[:, 3] = True, True
    assert torch.equal(~out.isfinite(), expected)


@pytest.mark.parametrize("shapes", [(4, 48, 8), (4, 64, 6)], ids=["inner size", "outputs"])
def test_sizes_that_are_not_covered(shapes: tuple[int, int, int]) -> None:
    assert not covers(*factors(*shapes))


def test_views_with_gaps_are_not_covered() -> None:
    left, right, out = factors(8, 64, 8)
    assert not covers(left[::2], right, out[::2])
    assert not covers(left, right, torch.empty(8, 16)[:, :8])
