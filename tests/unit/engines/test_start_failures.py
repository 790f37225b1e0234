"""An engine's process that does not come up: what is told, and which key to change. Its programs write what SGLang does
when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.engines.rollout.hosted import hosted_engine as hosted
from rl_platform.engines.rollout.sglang import sglang_client as sglang
from rl_platform.engines.rollout.sglang.program import SGLangSetup
from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine
from rl_platform.errors import ConfigError, PlatformError, WorkerError

TRACEBACK = 'print("Traceback (most recent call last):\\n  File model_runner.py, line 7, in load_model", flush=True)\n'
SETUP = SGLangSetup({}, "cuda", 1, "float32", 16, None, 0.42, seed=0)


@pytest.fixture
def failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """failure(program): what comes of an engine that runs it."""
    (tmp_path / "engine.log").write_text("CUDA out of memory of an earlier run\n")

    def start(program: str) -> PlatformError:
        monkeypatch.setattr(sglang, "PROGRAM", program)
        with pytest.raises(PlatformError) as caught:
            SGLangEngine("rollout[1]", SETUP, (), {}, tmp_path / "engine.log")
        return caught.value

    return start


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [
        (
            "ValueError: Model architectures ['PhiMoEForCausalLM'] are not supported for now. Supported architectures:",
            "rollout.backend",
            "PhiMoEForCausalLM",
        ),
        (
            "ValueError: Cannot find model module. 'PhiMoEForCausalLM' is not a registered model in the Transformers",
            "rollout.backend",
            "PhiMoEForCausalLM",
        ),
        (
            "ValueError: PhiMoEForCausalLM has no SGlang implementation and the Transformers implementation is not "
            "compatible with SGLang.",
            "rollout.backend",
            "PhiMoEForCausalLM",
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.42.",
            "rollout.gpu_memory_utilization",
            "no room is left for keys and values",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "rollout.gpu_memory_utilization",
            "no room is left for keys and values",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "rollout.gpu_memory_utilization",
            "memory ran out while the engine started",
        ),
    ],
)
def test_reasons_that_are_known(failure, words: str, key: str, told: str) -> None:
    error = failure(TRACEBACK + f"print({words!r}, flush=True); raise SystemExit(1)")
    assert isinstance(error, ConfigError)
    (problem,) = error.problems
    assert problem.key == key
    assert told in problem.message
    assert problem.value == ("sglang" if key == "rollout.backend" else "0.42")
    assert problem.hint


def test_another_reason_shows_the_end_of_the_log_and_nothing_of_an_earlier_run(failure) -> None:
    error = failure("print('first'); [print('line', n) for n in range(60)]; raise SystemExit(1)")
    assert isinstance(error, WorkerError)
    assert str(error).startswith("rollout[1]: SGLang did not start: the engine's process died")
    assert str(error).endswith("line 59")
    assert "first" not in str(error)
    assert "earlier run" not in str(error)


def test_one_that_does_not_start_within_its_deadline_shows_the_end_of_its_log(
    failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "START_S", 8.0)  # a process that prints may need seconds to start on a busy machine
    error = failure("import time; print('loading weights', flush=True); time.sleep(60)")
    assert isinstance(error, WorkerError)
    assert "SGLang did not start: the engine did not answer to start within 8 s" in str(error)
    assert str(error).endswith("loading weights")
