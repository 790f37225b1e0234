"""What rollout engines start with: the built-in one's type of numbers; ranks, GPUs and cores of SGLang's process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_platform.engines.rollout.build import generation_dtype
from rl_platform.engines.rollout.hosted.build import check_ranks
from rl_platform.engines.rollout.hosted.hosted_engine import EngineProcess, not_inherited, visible_gpus
from rl_platform.engines.rollout.sglang.program import SGLangSetup, engine_environment
from rl_platform.errors import ConfigError

CPU = torch.device("cpu")


def test_float32_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert generation_dtype("float32", CPU) is torch.float32


@pytest.mark.parametrize("faster", [True, False])
def test_bfloat16_only_where_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: faster)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert generation_dtype("bfloat16", CPU) is (torch.bfloat16 if faster else torch.float32)


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(8, 8, 4), (8, 2, 4), (9, 3, 3), (14, 2, 2), (9, 3, 1)])
def test_ranks_that_can_share_the_heads(heads: int, key_heads: int, ranks: int) -> None:
    check_ranks(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads), ranks)


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(9, 3, 2), (8, 8, 3), (12, 4, 6)])
def test_ranks_that_cannot_are_told_before_anything_starts(heads: int, key_heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads), ranks)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("rollout.tensor_parallel_size", str(ranks))
    assert f"cannot share {heads} heads" in problem.message


EXPANDABLE = "expandable_segments:True"
ENVIRONMENT = """
import json, os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()
values = [os.environ.get(name) for name in ("MALLOC_ARENA_MAX", "PYTORCH_ALLOC_CONF")]
connection.send_bytes(json.dumps((0, "answer", values)).encode())
connection.recv_bytes()
"""
ON_GPU = SGLangSetup({}, "cuda", 2, "bfloat16", 16, None, 0.6, seed=0, accelerators=(2, 3))
ON_CPU = replace(ON_GPU, device="cpu", accelerators=())


def test_an_engine_counts_its_own_gpus_from_0_and_sees_the_others_behind_them() -> None:
    shown = engine_environment(ON_GPU, [0, 1], ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    assert shown == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d,GPU-a,GPU-b"}


@pytest.mark.parametrize(
    ("ranks", "cores", "bound"),
    [
        (1, [0, 1], {}),
        (2, [0, 1], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
        (2, [4, 5, 8, 9, 12], {"SGLANG_CPU_OMP_THREADS_BIND": "4,5|8,9,12"}),
        (4, [0, 1], {"SGLANG_CPU_OMP_THREADS_BIND": "0,1|0|0,1|1"}),
    ],
)
def test_tensor_parallel_ranks_on_a_cpu_share_its_cores(ranks: int, cores: list[int], bound: dict[str, str]) -> None:
    variables = engine_environment(replace(ON_CPU, tensor_parallel=ranks), cores, [])
    assert variables == {"SGLANG_USE_CPU_ENGINE": "1"} | bound


def test_an_engine_inherits_no_setting_that_is_for_learners() -> None:
    of_host = {"MALLOC_ARENA_MAX": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": EXPANDABLE}
    removed = dict.fromkeys(of_host)
    assert not_inherited(of_host) == removed
    others = "max_split_size_mb:64, expandable_segments:True,pinned_num_register_threads:8"
    changed = not_inherited({"PYTORCH_CUDA_ALLOC_CONF": others})
    assert changed == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,pinned_num_register_threads:8"}
    chosen = {"MALLOC_ARENA_MAX": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "PYTORCH_ALLOC_CONF": "backend:native"}
    assert not_inherited(chosen) == {}


def test_the_engines_process_is_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    process = EngineProcess(ENVIRONMENT, None, {"PYTORCH_ALLOC_CONF": "backend:native"}, tmp_path / "log")
    try:
        assert process.started.wait(60) == [None, "backend:native"], "what the config sets wins"
    finally:
        process.kill()


def test_gpus_have_the_names_that_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    count: Any = lambda: 2  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", count)
    assert visible_gpus() == ["0", "1"]
