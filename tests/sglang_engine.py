"""Real SGLang engines for tests, on a CPU; tests that need one are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "sglang_cpu"
ENGINE_ENV = {"PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": "1"}

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="sglang is not installed: tests/sglang_cpu/README.md"
)
