"""Joins the operations between matrix products into few kernels on a GPU, by torch.compile.

A kernel of elementwise operations takes as long as its reads and writes of memory; a fused one reads and writes each
tensor once. Only small functions are compiled, once for all sizes: modules, attention and autograd stay as they are.
Not covered: CPUs, machines without Triton or without a C compiler, and `runner.deterministic`, because torch.compile
selects some kernels by time measurements.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)
Arguments, Output = ParamSpec("Arguments"), TypeVar("Output")


def fused(function: Callable[Arguments, Output], device: torch.device) -> Callable[Arguments, Output]:
    """Returns `function`, compiled if torch.compile works on `device`; the first call then takes some seconds."""
    return torch.compile(function, dynamic=True) if fuses(device) else function


def fuses(device: torch.device) -> bool:
    """Returns whether functions are compiled for `device`; warns once if torch.compile fails on a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return False
    return _compiles(device)


@cache
def _compiles(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        torch.compile(lambda numbers: numbers * 2 + 1)(torch.zeros(2, device=device))
    except Exception as error:  # without a C compiler, for example
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("torch.compile does not work here, so training on the GPU is slower: %s", reason)
        return False
    return True
