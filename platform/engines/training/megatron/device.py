"""Runs Megatron-Core on a GPU, or on a CPU of a machine without GPUs.

Megatron's modules and a few tensor methods name CUDA literally. Without GPUs those modules get a view of torch in which
these names mean the CPU; torch and all other libraries are unchanged. Not covered: CUDA streams and graphs, fused
kernels.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_SCOPE = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "full", "empty", "empty_like", "zeros_like", "arange")


def prepare(device: torch.device) -> str:
    """Prepares Megatron for `device` and returns the torch.distributed backend.

    Raises RuntimeError for the CPU of a machine with GPUs, because Megatron would use both.
    """
    if device.type == "cuda":
        # With one queue the GPU starts kernels in the order of their launch. Megatron needs this order to start the
        # communication of tensor-parallel ranks before the computation that overlaps it. CUDA reads the variable when
        # it is initialised.
        os.environ.setdefault(CONNECTIONS, "1")
        torch.cuda.set_device(device)
        return "nccl"
    if torch.cuda.is_available():
        raise RuntimeError("Megatron trains on the GPU of a machine that has one; hide it with CUDA_VISIBLE_DEVICES=")
    if not any(isinstance(finder, _LateModules) for finder in sys.meta_path):
        _install()
    return "gloo"


@contextmanager
def quiet_megatron() -> Iterator[None]:
    """Suppresses Megatron's warnings about kernels that are not installed, within the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def importing_megatron() -> Iterator[None]:
    """Silences the first import of Megatron and, without a GPU, compiles none of its functions.

    The import of the compiler takes longer than that of Megatron, and each process would compile the functions again.
    """
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _as_written
    try:
        with quiet_megatron():
            yield
    finally:
        torch.compile = compile_


def _as_written(model: Callable[..., Any] | None = None, **_: object) -> Any:
    """Replaces `torch.compile`, as a decorator with or without arguments."""
    return _as_written if model is None else model


class _View(ModuleType):
    """A module that replaces some names of `base`."""

    def __init__(self, base: ModuleType, **replaced: object) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


class _NoStream:
    """A CUDA stream of a CPU, whose operations have always finished."""

    def wait_stream(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _NoStream:
        return self


def _torch_without_cuda() -> ModuleType:
    stream = _NoStream()
    cuda = _View(
        torch.cuda,
        current_device=lambda: _CPU,
        Stream=lambda *_, **__: stream,
        current_stream=lambda *_: stream,
        stream=lambda *_: nullcontext(),
        synchronize=_nothing,
        empty_cache=_nothing,
        get_rng_state=lambda *_: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
    )
    distributed = _View(torch.distributed, all_to_all_single=_all_to_all)
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _View(torch, cuda=cuda, distributed=distributed, **factories)


def _all_to_all(output: torch.Tensor, input: torch.Tensor, **options: object) -> dist.Work | None:
    """Converts sizes to lists: Megatron passes tensors on a CPU, which torch refuses."""
    sizes = {name: value.tolist() for name, value in options.items() if isinstance(value, torch.Tensor)}
    return torch.distributed.all_to_all_single(output, input, **(options | sizes))


def _nothing(*_: object, **__: object) -> None: ...


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*args: object, **kwargs: object) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return made


_VIEW = _torch_without_cuda()


def _in_scope(name: str) -> bool:
    return name == _SCOPE or name.startswith(f"{_SCOPE}.")


def _use_view(module: ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _VIEW
    if module.__name__ == "megatron.core.tensor_parallel.random":
        module.__dict__["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
        module.__dict__["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)


class _LateModules(importlib.abc.MetaPathFinder):
    """Gives the view of torch to Megatron modules that are imported later."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _in_scope(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_with_view(module: ModuleType) -> None:
                run(module)
                _use_view(module)

            spec.loader.exec_module = run_with_view  # type: ignore[method-assign]
        return spec


def _install() -> None:
    for name, module in list(sys.modules.items()):
        if module is not None and _in_scope(name):
            _use_view(module)
    sys.meta_path.insert(0, _LateModules())
    to_cuda, type_of = torch.Tensor.cuda, torch.Tensor.type

    def called_by_megatron() -> bool:
        return _in_scope(sys._getframe(2).f_globals.get("__name__", ""))

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if called_by_megatron() else to_cuda(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns CUDA names to Megatron, which compares types with 'torch.cuda.FloatTensor'."""
        name = type_of(self, *args, **kwargs)
        if isinstance(name, str) and called_by_megatron():
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.cuda = cuda  # type: ignore[method-assign]
    torch.Tensor.type = type_  # type: ignore[method-assign]
