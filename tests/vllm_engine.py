"""Real vLLM engines for tests, on a CPU; tests that need one are skipped where it is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
VLLM_PYTHON = os.environ.get("RL_PLATFORM_VLLM_PYTHON", str(DEFAULT))
ENGINE_ENV = {"OMP_NUM_THREADS": "1"}

needs_vllm = pytest.mark.skipif(
    not Path(VLLM_PYTHON).exists(), reason="vllm is not installed: tests/vllm_cpu/README.md"
)
