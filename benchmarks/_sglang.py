"""SGLang's engine on a CPU, with the stand-ins of tests/sglang_cpu, for the scripts that measure it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAND_INS = Path(__file__).resolve().parents[1] / "tests" / "sglang_cpu"


def installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


@contextmanager
def cpu_engine(network: Any, running: int, room: int, threads: int | None) -> Iterator[Any]:
    """`running`: requests at a time; `room`: tokens of keys and values; `threads` None: one for each core."""
    from rl_platform.engines.rollout.sglang.engine import HostedEngine
    from rl_platform.engines.rollout.sglang.program import EngineSetup

    model = network.config.to_dict() | {"eos_token_id": None}
    setup = EngineSetup(model, "cpu", 1, "float32", running, room, 0.1, seed=1)
    environment = {"PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0)))}
    with tempfile.TemporaryDirectory() as folder:
        engine = HostedEngine("rollout", setup, (), environment, Path(folder, "sglang.log"))
        try:
            yield engine
        finally:
            engine.close()
