"""The compiled attention of running sequences, against torch's attention over the same keys and values."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.accel.openmp_team import has_team
from rl_platform.engines.rollout.kv_cache import PAGE, KVCache
from rl_platform.engines.rollout.paged_attention import DecodeAttention, Readers, decode_attention
from rl_platform.runtime.cpu import release_team

pytestmark = pytest.mark.skipif(not has_team(), reason="torch computes without libgomp here")
LAYERS, LAYER, SCALING = 3, 1, 0.3
# of a sequence before the new token: a page's borders, none, and one whose first page is another's too
LENGTHS = (1, 0, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 3 * PAGE + 17, PAGE + 5)


def sequences(
    heads: int, head_dim: int, lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float32
) -> tuple[KVCache, list[Any]]:
    """A cache of random numbers and its rows. The last two share a page."""
    torch.manual_seed(0)
    cache = KVCache(LAYERS, len(lengths), heads, head_dim, dtype=dtype, device=torch.device("cpu"))
    rows = [SimpleNamespace(stored=length, pages=[]) for length in lengths]
    for row in rows:
        row.pages += [cache.take() for _ in range(row.stored // PAGE)]
    if len(rows) > 1 and rows[-1].pages:
        rows[-1].pages[0] = rows[-2].pages[0]
    for tensor in (cache.tails, *(page.data for row in rows for page in row.pages)):
        tensor.normal_()
    return cache, rows


def new_token(rows: int, group: int, heads: int, head_dim: int) -> list[Tensor]:
    """Query, key and value, side by side in memory as layers have them."""
    together = torch.randn(rows, (group + 2) * heads, head_dim)
    return [part.transpose(0, 1)[None] for part in together.split([group * heads, heads, heads], dim=1)]


def expected(cache: KVCache, rows: Sequence[Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[n,Hq,D], in float32"""
    outputs = []
    for slot, row in enumerate(rows):
        tail = cache.tails[LAYER, :, slot, :, : row.stored % PAGE]
        stored = torch.cat([*(page.data[LAYER] for page in row.pages), tail], dim=2)
        keys, values = (
            torch.cat([old, new[0, :, slot, None]], dim=1).float()
            for old, new in zip(stored, (key, value), strict=True)
        )
        asked = query[0, :, slot].float().view(len(keys), -1, keys.shape[-1])
        outputs.append(F.scaled_dot_product_attention(asked, keys, values, scale=SCALING).flatten(0, 1))
    return torch.stack(outputs)


def computed(cache: KVCache, rows: Sequence[Any], new: Sequence[Tensor]) -> Tensor:
    readers, compiled = decode_attention(cache)
    assert compiled is not DecodeAttention
    return compiled(cache, rows, readers(cache, rows))(LAYER, *new, SCALING)


@pytest.mark.parametrize(("head_dim", "heads", "group"), [(16, 2, 1), (64, 3, 3), (96, 1, 8), (128, 2, 4), (40, 2, 5)])
def test_it_attends_to_all_tokens_so_far(head_dim: int, heads: int, group: int) -> None:
    cache, rows = sequences(heads, head_dim)
    new, before = new_token(len(rows), group, heads, head_dim), cache.tails.clone()
    wanted = expected(cache, rows, *new)
    torch.testing.assert_close(computed(cache, rows, new), wanted, rtol=0, atol=1e-5)
    for slot, row in enumerate(rows):
        for which, tensor in enumerate(new[1:]):
            before[LAYER, which, slot, :, row.stored % PAGE] = tensor[0, :, slot]
    assert torch.equal(cache.tails, before), "the new keys and values are written, and nothing else"


@pytest.mark.parametrize(("head_dim", "heads", "group"), [(64, 3, 3), (40, 2, 5)])
def test_bfloat16_is_rounded_once(head_dim: int, heads: int, group: int) -> None:
    cache, rows = sequences(heads, head_dim, dtype=torch.bfloat16)
    new = [part.bfloat16() for part in new_token(len(rows), group, heads, head_dim)]
    wanted = expected(cache, rows, *new)
    found = computed(cache, rows, new)
    assert found.dtype == torch.bfloat16
    # half of the last of 8 bits, and float32's rounding before it
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8 + 1e-5, atol=1e-5)
    for slot, row in enumerate(rows):
        for which, tensor in enumerate(new[1:]):
            assert torch.equal(cache.tails[LAYER, which, slot, :, row.stored % PAGE], tensor[0, :, slot])


def test_bfloat16_that_is_no_number_stays_so_in_its_own_row() -> None:
    cache, rows = sequences(1, 16, dtype=torch.bfloat16)
    new = [part.bfloat16() for part in new_token(len(rows), 2, 1, 16)]
    new[0][0, 1, 4] = torch.nan
    broken = computed(cache, rows, new).isnan()
    assert broken[4, 1].all()
    assert broken.sum() == 16


def test_scores_far_apart() -> None:
    cache, rows = sequences(2, 16)
    new = new_token(len(rows), 2, 2, 16)
    new[0].mul_(200)  # e^-100 and less beside e^0
    torch.testing.assert_close(computed(cache, rows, new), expected(cache, rows, *new), rtol=0, atol=2e-5)


def test_what_is_no_number_stays_so_in_its_own_row() -> None:
    cache, rows = sequences(1, 16)
    new = new_token(len(rows), 2, 1, 16)
    new[0][0, 1, 4] = torch.nan
    broken = computed(cache, rows, new).isnan()
    assert broken[4, 1].all()
    assert broken.sum() == 16


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    cache, rows = sequences(3, 64)
    new = new_token(len(rows), 3, 3, 64)
    alone = computed(cache, rows, new)
    torch.set_num_threads(threads)
    for _ in range(20):
        assert torch.equal(computed(cache, rows, new), alone)
        release_team()  # as between the calls of a component


def test_several_components_at_the_same_time() -> None:
    """Threads of one process, each with a team of its own."""
    wrong: list[int] = []

    def compute(number: int) -> None:
        torch.set_num_threads(2)
        cache, rows = sequences(2, 16)
        for _ in range(50):
            new = new_token(len(rows), 2, 2, 16)
            if not torch.allclose(computed(cache, rows, new), expected(cache, rows, *new), rtol=0, atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_only_float32_and_bfloat16_on_a_cpu_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = sequences(1, 16)
    assert decode_attention(cache) != (Readers, DecodeAttention)
    half = KVCache(1, 1, 1, 16, dtype=torch.float16, device=torch.device("cpu"))
    other = KVCache(1, 1, 1, 16, dtype=torch.float32, device=torch.device("meta"))
    assert decode_attention(half) == decode_attention(other) == (Readers, DecodeAttention)
    monkeypatch.setattr("rl_platform.accel.openmp_team.has_team", lambda: False)
    assert decode_attention(cache) == (Readers, DecodeAttention)


TEAM = """
import os, torch
from types import SimpleNamespace as Row
from rl_platform.engines.rollout.paged_attention import decode_attention
from rl_platform.engines.rollout.kv_cache import KVCache

torch.set_num_threads(4)
torch.ones(1 << 20).add(1.0)
before = len(os.listdir("/proc/self/task"))
cache = KVCache(1, 1, 1, 16, dtype=torch.float32, device=torch.device("cpu"))
new = [torch.ones(1, 1, 1, 16)] * 3
readers, compiled = decode_attention(cache)
rows = [Row(stored=0, pages=[])]
assert compiled(cache, rows, readers(cache, rows))(0, *new, 1.0).eq(1).all()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
def test_it_runs_in_the_team_that_torch_has() -> None:
    done = subprocess.run([sys.executable, "-c", TEAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0"], done.stderr
