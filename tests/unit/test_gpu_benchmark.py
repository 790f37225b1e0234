"""The benchmark for a GPU: it runs from end to end where there is none, and says so before it measures nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training_gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_ends_with_one_clear_line() -> None:
    ended = run()
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "training_gpu.py: torch sees no GPU on this machine. --dry-run tries the script out on the CPU."
    ]
    assert ended.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine")
def test_its_dry_run_measures_all_three_and_they_agree(tmp_path: Path) -> None:
    ended = run("--dry-run", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found.keys() == {"equal", "mixed"}
    for of_case in found.values():
        assert of_case.keys() == {"plain FSDP", "fsdp", "megatron"}
        norms = [one["grad_norm"] for one in of_case.values()]
        assert norms[0] > 1e-3
        assert norms == pytest.approx([norms[0]] * 3, rel=0.02)  # bfloat16
        assert all(len(one["seconds"]) == 1 and one["tokens_per_s"] > 0 for one in of_case.values())
    assert found["equal"]["fsdp"]["tokens_per_s"] * found["equal"]["fsdp"]["seconds"][0] == pytest.approx(4 * 32)
    assert "MFU not known" in ended.stdout


@pytest.fixture
def benchmark(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return script(SCRIPT)


ONE_ROW = Namespace(dry_run=True, rows=1, length=8)


def test_the_work_of_a_step_is_what_its_tokens_need(benchmark: ModuleType) -> None:
    """By hand: matrices of two layers, causal attention, logits of the six tokens after the prompt's two."""
    attention, feed_forward = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 96
    matrices = 8 * 2 * (attention + feed_forward)
    pairs = 2 * (8 * 8 // 2) * 2 * 64  # layers, half of the pairs, scores and sums, width
    assert benchmark.flops(ONE_ROW, "equal") == 3 * 2 * (matrices + pairs + 6 * 64 * 512)


def test_a_contestant_that_fails_is_named_and_the_others_are_reported(benchmark: ModuleType, capsys) -> None:
    measured = {"seconds": [2.0], "grad_norm": 1.0, "peak_bytes": 2**30}
    found = {"plain FSDP": {"error": "OutOfMemoryError: 80 GiB"}, "fsdp": dict(measured), "megatron": dict(measured)}
    benchmark.report("equal", ONE_ROW, found, peak=benchmark.flops(ONE_ROW, "equal"))
    said = capsys.readouterr().out
    assert "plain FSDP failed: OutOfMemoryError: 80 GiB" in said
    assert "fsdp: 2 s, 4 tokens/s per GPU, MFU 50.0 %, 1.0 GiB" in said
    assert "times the speed" not in said
