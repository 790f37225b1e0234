"""What SGLang's process sees of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_platform.engines.rollout.sglang.engine import visible_gpus
from rl_platform.engines.rollout.sglang.program import EngineSetup, engine_environment

ON_GPU = EngineSetup({}, "cuda", 2, "bfloat16", 16, None, 0.6, seed=0, accelerators=(2, 3))
ON_CPU = replace(ON_GPU, device="cpu", accelerators=())


def test_an_engine_counts_its_own_gpus_from_0_and_sees_the_others_behind_them() -> None:
    shown = engine_environment(ON_GPU, [0, 1], ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    assert shown == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d,GPU-a,GPU-b"}


@pytest.mark.parametrize(
    ("ranks", "cores", "bound"), [(2, [0, 1], "0|1"), (2, [4, 5, 8, 9, 12], "4,5|8,9,12"), (4, [0, 1], "0,1|0|0,1|1")]
)
def test_tensor_parallel_ranks_on_a_cpu_share_its_cores(ranks: int, cores: list[int], bound: str) -> None:
    variables = engine_environment(replace(ON_CPU, tensor_parallel=ranks), cores, [])
    assert variables == {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}


def test_one_rank_on_a_cpu_has_all_cores() -> None:
    alone = replace(ON_CPU, tensor_parallel=1)
    assert engine_environment(alone, [0, 1], []) == {"SGLANG_USE_CPU_ENGINE": "1"}


def test_gpus_have_the_names_that_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    count: Any = lambda: 2  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", count)
    assert visible_gpus() == ["0", "1"]
