"""Runs one part in a process of its own, with a time limit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, set_forkserver_preload
from pathlib import Path
from typing import Any

from gpu_parts.part import Part, Report, Setup

PRELOADED = [  # by the server that forks the processes of parts; none of them initialises CUDA
    "accelerate",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "rl_platform.launch.session",
]
RUNS = Path(__file__).resolve().parents[2] / "runs" / "gpu"
LOGGED = 4000  # characters of a failed part's output


def run_part(part: Part, small: bool, vllm_python: str | None, limit_s: float) -> dict[str, Any]:
    """Returns the part's state, seconds and figures, and the end of its output unless it passed.

    state: passed, missed (a target), failed, or timed out. The part's processes are killed at the limit. The files of a
    part that did not pass stay in RUNS/PART until it runs again.
    """
    with _folder(part.name, small) as folder:
        setup, report = Setup(small, folder / "files", vllm_python), Report(folder / "figures.jsonl", small)
        setup.folder.mkdir()
        report.path.touch()
        log = folder / "log"
        process = get_context(setup.start).Process(target=_measure, args=(part, setup, report, str(log)))
        began = time.monotonic()
        process.start()
        process.join(limit_s)
        late = process.is_alive()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also ends its children
        process.join()
        figures = [json.loads(line) for line in report.path.read_text(encoding="utf-8").splitlines()]
        found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "figures": figures}
        if late:
            found |= {"state": "timed out", "error": f"stopped after {limit_s:.0f} s"}
        elif process.exitcode:
            found |= {"state": "failed", "error": f"exit code {process.exitcode}"}
        elif any(figure["met"] is False for figure in figures):
            found["state"] = "missed"
        else:
            shutil.rmtree(folder, ignore_errors=True)
            return found | {"state": "passed"}
        output = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
        if output and found["state"] == "failed":
            lines = [line for line in output.splitlines() if line[:1].strip()]  # a hint below an error is indented
            found["error"] = (lines or [output])[-1][:300]
        return found | {"output": output[-LOGGED:]}


@contextmanager
def _folder(name: str, small: bool) -> Iterator[Path]:
    """Yields an empty folder for the runs of a part; that of a small run is temporary."""
    if small:
        with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
    folder.mkdir(parents=True)
    yield folder


def _measure(part: Part, setup: Setup, report: Report, log: str) -> None:
    """Measures as the leader of a process group, so that its children can be killed with it."""
    os.setpgid(0, 0)
    set_forkserver_preload(PRELOADED)  # a part may start processes too
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    try:
        part.measure(setup, report)
    except BaseException:
        sys.stdout.flush()
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
