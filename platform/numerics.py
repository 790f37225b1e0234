"""Settings of computation on accelerators: the precision of float32 products, and kernels that repeat their results.

The settings belong to a process. CPUs always compute float32 products in full precision, in a fixed order, so nothing
here changes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_platform.environment_variables import changed_variables

VARIABLE = "RL_PLATFORM_NUMERICS"
# Libraries read these when a process first uses CUDA. cuBLAS adds in a fixed order only with workspaces of a fixed
# size; Transformer Engine selects deterministic kernels of attention.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@contextmanager
def computing(precision: str, *, deterministic: bool, here: bool) -> Iterator[None]:
    """Applies `runner.matmul_precision` (highest or high) and `runner.deterministic` to the processes of a run.

    here: applies them to this process too, and restores its own settings after the block.
    """
    backends = torch.backends
    before = (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # `apply` may set those of `_DETERMINISTIC`: they are restored too
    variables: dict[str, str | None] = {VARIABLE: f"{precision} deterministic" if deterministic else precision}
    variables |= {name: os.environ.get(name) for name in _DETERMINISTIC}
    try:
        with changed_variables(variables):
            if here:
                apply()
            yield
    finally:
        if here:
            backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark = before
            torch.use_deterministic_algorithms(was_deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def apply() -> None:
    """Applies the settings of the run to this process, which must have accelerators and must not have used CUDA."""
    precision, _, deterministic = os.environ.get(VARIABLE, "highest").partition(" ")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "high"
    if deterministic:
        for name, value in _DETERMINISTIC.items():
            os.environ.setdefault(name, value)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        # filling costs time, and nothing reads such memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
