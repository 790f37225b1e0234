"""The compiled operations between matrix products, against torch's on the same numbers in float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.accel.openmp_team import has_team
from rl_platform.accel.row_kernels import gated_backward, norm_backward
from rl_platform.engines.rollout.decoder import RowOperations

pytestmark = pytest.mark.skipif(not has_team(), reason="torch computes without libgomp here")
CPU = torch.device("cpu")
PLAIN = RowOperations()
ROUNDED_ONCE = {"rtol": 2**-8 + 1e-5, "atol": 1e-6}  # half of the last of 8 bits, and float32's rounding before it
ROWS = (1, 5, 300)  # computed by one thread, and by several


def compiled() -> RowOperations:
    found = acceleration.find("row_operations", CPU, torch.bfloat16)
    assert found is not None
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [32, 65, 576])
def test_norm(rows: int, width: int) -> None:
    states, more = random(rows, width).float() / 3, random(rows, width + 1)[:, 1:].contiguous()
    module = SimpleNamespace(weight=random(width), variance_epsilon=1e-5)
    wide = SimpleNamespace(weight=module.weight.float(), variance_epsilon=1e-5)
    before, total = states.clone(), states + more
    alone = compiled().norm(states, module)
    assert torch.equal(states, before)
    torch.testing.assert_close(alone.float(), PLAIN.norm(before, wide), **ROUNDED_ONCE)
    added = compiled().norm(states, module, more)
    assert torch.equal(states, total), "the sum is in place and float32"
    torch.testing.assert_close(added.float(), PLAIN.norm(total, wide), **ROUNDED_ONCE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [8, 64])
def test_rotary_embedding(rows: int, size: int) -> None:
    heads, cos, sin = random(rows, 7, size), random(rows, 1, size).float(), random(rows + 1, 1, size)[1:].float()
    wanted = PLAIN.rotate(heads.float(), 5, cos, sin)
    values = heads[:, 5:].clone()
    found = compiled().rotate(heads, 5, cos, sin)
    torch.testing.assert_close(found[:, :5].float(), wanted, rtol=2**-8, atol=1e-5)
    assert torch.equal(heads[:, 5:], values)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [48, 77])
def test_gated(rows: int, width: int) -> None:
    both = 8 * random(rows, 2 * width)
    torch.testing.assert_close(compiled().gated(both).float(), PLAIN.gated(both.float()), **ROUNDED_ONCE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [65, 576])
def test_gradients_of_norm(rows: int, width: int) -> None:
    states, of_outputs = random(rows, width).float(), random(rows + 1, width)[1:].float()
    weight, before = random(width), random(rows, width).float().mul(2)
    inputs, wide = states.clone().requires_grad_(), weight.float().requires_grad_()
    PLAIN.norm(inputs, SimpleNamespace(weight=wide, variance_epsilon=1e-5)).backward(of_outputs)
    gradient = before.clone()
    of_weight = norm_backward(gradient, of_outputs.clone(), states, weight, 1e-5)
    assert inputs.grad is not None
    torch.testing.assert_close(gradient - before, inputs.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_weight, wide.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [48, 77])
def test_gradients_of_gated(rows: int, width: int) -> None:
    both, of_product = 4 * random(rows, 2 * width), random(rows, width)
    inputs = both.float().requires_grad_()
    PLAIN.gated(inputs).backward(of_product.float())
    torch.testing.assert_close(gated_backward(of_product, both).float(), inputs.grad, rtol=2**-8 + 1e-4, atol=1e-6)


def test_what_is_no_number_stays_so_in_its_own_row() -> None:
    states, both = random(3, 32).float(), random(3, 32)
    states[1, 4] = both[1, 4] = torch.nan
    normed = compiled().norm(states, SimpleNamespace(weight=random(32), variance_epsilon=1e-5)).isnan()
    assert normed[1].all()
    assert normed.sum() == 32
    assert compiled().gated(both).isnan().nonzero().tolist() == [[1, 4]]


def test_rows_do_not_depend_on_each_other_or_on_threads() -> None:
    states, both = random(300, 576).float(), random(300, 3072)
    module = SimpleNamespace(weight=random(576), variance_epsilon=1e-5)
    normed, gated = compiled().norm(states, module), compiled().gated(both)
    torch.set_num_threads(3)
    assert torch.equal(compiled().norm(states[7:9].clone(), module), normed[7:9])
    assert torch.equal(compiled().norm(states, module), normed)
    assert torch.equal(compiled().gated(both[7:9].clone()), gated[7:9])
    assert torch.equal(compiled().gated(both), gated)


def test_only_bfloat16_on_a_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert acceleration.find("row_operations", CPU, torch.float32) is None
    assert acceleration.find("row_operations", torch.device("meta"), torch.bfloat16) is None
    monkeypatch.setenv(acceleration.VARIABLE, "off")
    assert acceleration.find("row_operations", CPU, torch.bfloat16) is None
