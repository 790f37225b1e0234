"""Groups beside the default one have its time limit, `cluster.collective_timeout_s`, and the right ranks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from process_groups import end_process_groups

from rl_platform.config.schema.models import Parallel
from rl_platform.engines.training.sharing import group_along
from rl_platform.runtime import collective_limit
from rl_platform.runtime.ray.process_group import Rendezvous, join_group

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
LIMIT_S = 77.0
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collective_limit, "_limit", collective_limit.collective_limit())
    end_process_groups()
    yield
    end_process_groups()


def join_alone() -> None:
    join_group(Rendezvous("127.0.0.1", 1), 0, 1, LIMIT_S, cuda=False)


def limit_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(CPU).options._timeout  # type: ignore[no-any-return]


def test_groups_of_some_ranks() -> None:
    join_alone()
    assert limit_of(dist.group.WORLD) == timedelta(seconds=LIMIT_S)
    assert limit_of(group_along(0, (1, 1))) == timedelta(seconds=LIMIT_S)


def test_groups_of_megatron() -> None:
    from rl_platform.engines.training.megatron.process_groups import parallel_state, start_groups

    join_alone()
    start_groups(Parallel(), CPU)
    for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()):
        assert limit_of(group) == timedelta(seconds=LIMIT_S)


@pytest.mark.parametrize(
    ("axis", "expected"), [(0, [2, 6]), (1, [0, 2]), (2, [2, 3])], ids=["outermost", "middle", "innermost"]
)
def test_ranks_that_differ_along_an_axis_form_a_group(axis: int, expected: list[int]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    assert dist.get_process_group_ranks(group_along(axis, (2, 2, 2))) == expected
