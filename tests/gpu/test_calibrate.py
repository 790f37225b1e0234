"""On a GPU: the measurement of the link to host memory is a rate that a link can have."""

from __future__ import annotations

import pytest
import torch

from rl_platform.launch.tools.device_measurements import host_link_rate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def test_the_link_from_host_memory() -> None:
    assert 1e9 < host_link_rate(torch.device("cuda", 0)) < 1e12
