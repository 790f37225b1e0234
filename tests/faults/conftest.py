"""What tests of faults on Ray share: a cluster that the runs of a file join, and one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def address(forked_workers: None) -> Iterator[str]:
    """A Ray cluster that the runs of this module join one after the other."""
    with ray_cluster(2, store_mib=256) as address:
        yield address


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes of a run: sums of several threads depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
