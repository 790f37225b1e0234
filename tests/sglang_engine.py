"""Real SGLang engines for tests, on a CPU; tests that need one are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "sglang_cpu"
ENGINE_ENV = {"PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": "1"}
# What an engine's process and its scheduler import, a part of it only when the engine starts.
ENGINE_IMPORTS = """
import rl_platform.engines.rollout.sglang.program, rl_platform.engines.rollout.sglang.shared_weights
import sglang, sglang.srt.entrypoints.engine, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager
import sglang.srt.elastic_ep.expert_backup_manager, sglang.srt.entrypoints.engine_info_bootstrap_server
import sglang.srt.model_executor.model_runner, sglang.srt.models.registry, sglang.srt.weight_cache.daemon
import sglang.srt.function_call.function_call_parser, sglang.srt.parser.template_manager
"""

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="sglang is not installed: tests/sglang_cpu/README.md"
)
