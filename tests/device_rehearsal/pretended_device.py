"""A pretended GPU: its tensors report `cuda:0` and compute on the CPU.

An operation that mixes them with tensors of the CPU raises `MixedDevices`, as it would on a GPU. The device counts what
would cost time there: launches of kernels, synchronisations of the host and copies between host and device. Not
covered: kernels, their rounding, streams, NCCL, IPC, and devices inside C++ formulas of autograd, which read the CPU.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
MEMORY = 80 * 2**30
REPOSITORY = Path(__file__).parents[2]
SOURCES = tuple(f"{REPOSITORY / folder}/" for folder in ("platform", "envs", "launch"))
TESTS = f"{REPOSITORY / 'tests'}/"

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "set_", "resize_"}
COPIES = {"_to_copy", "copy_", "copy"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # torch accepts indices on the CPU
# The shape or the value of the result depends on numbers of the device.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
}


class MixedDevices(RuntimeError):
    """An operation got tensors of the CPU and of the pretended device."""


@dataclass
class Counts:
    """Numbers of events by the file and line of this project that caused them.

    synchronisations: the host waits for the device. copies: between host and device. launches: kernels; views and
    allocations are none.
    """

    launches: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)

    def totals(self) -> Counter[str]:
        return Counter({name: counter.total() for name, counter in vars(self).items()})

    def clear(self) -> None:
        for counter in vars(self).values():
            counter.clear()


@dataclass(eq=False)
class _Numbers:
    """The numbers of a tensor of the device. An object of its own, as a parameter with weak references cannot move."""

    tensor: Tensor


class OnDevice(torch.Tensor):
    """A tensor of the pretended device."""

    numbers: _Numbers

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, layout=inner.layout, device=CPU)
        made.numbers = _Numbers(inner)
        _current().live.add(made.numbers)
        return made

    inner = property(lambda self: self.numbers.tensor)
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(f"a tensor of the pretended device is pickled at {place()}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _METHODS.get(getattr(func, "__name__", ""))
        if replacement is not None and isinstance(args[0], OnDevice):
            return replacement(*args, **kwargs)
        if func == torch.Tensor.data.__set__ and isinstance(args[1], OnDevice):
            with torch._C.DisableTorchFunctionSubclass():
                func(*args)
            args[0].numbers.tensor = args[1].inner
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: OnDevice) -> Tensor:
        _current().copied(waits=True)
        return tensor.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return OnDevice(gradient)


def _to(tensor: OnDevice, *args: Any, **kwargs: Any) -> Tensor:
    copy = kwargs.pop("copy", False)
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return torch.empty_like(tensor.inner, device=device, dtype=dtype)
    result: Tensor = tensor if device is None or device.type == "cuda" else _ToHost.apply(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        if dtype is not None and dtype != result.dtype:
            return result.to(dtype)
        return result.clone() if copy and result is tensor else result


def _to_list(tensor: OnDevice) -> Any:
    _current().waited()
    return tensor.inner.tolist()


def _no_array(tensor: OnDevice, *_: Any, **__: Any) -> Any:
    raise TypeError(f"can't convert cuda:0 device type tensor to numpy, at {place()}")


def _type(tensor: OnDevice, dtype: Any = None, **_: Any) -> Any:
    return tensor.inner.type().replace("torch.", "torch.cuda.", 1) if dtype is None else tensor.to(dtype)


# Methods of a tensor that in C++ read the device, or convert to objects of Python.
_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": lambda tensor, **_: _to(tensor, CPU),
    "cuda": lambda tensor, *_, **__: tensor,
    "tolist": _to_list,
    "numpy": _no_array,
    "__array__": _no_array,
    "type": _type,
    "data_ptr": lambda tensor: tensor.inner.data_ptr(),
    "is_pinned": lambda tensor: False,
    "get_device": lambda tensor: 0,
    "untyped_storage": lambda tensor: tensor.inner.untyped_storage(),
    "new_tensor": lambda tensor, data, dtype=None, **_: torch.tensor(data, dtype=dtype or tensor.dtype, device=CUDA),
}


class Device:
    """counts: what happened on the device. live: the numbers of its tensors."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.live: weakref.WeakSet[_Numbers] = weakref.WeakSet()
        self._pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no other storage gets their address

    def waited(self) -> None:
        self.counts.synchronisations[place()] += 1

    def copied(self, *, waits: bool) -> None:
        self.counts.copies[place()] += 1
        if waits:
            self.waited()

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pinned(self) -> int:
        """Returns the bytes of the pinned buffers so far."""
        return sum(storage.nbytes() for storage in self._pinned.values())

    def allocated(self) -> int:
        """Returns the bytes of the storages of all tensors on the device."""
        storages = (numbers.tensor.untyped_storage() for numbers in list(self.live))
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


_devices: list[Device] = []


def _current() -> Device:
    assert _devices, "the tensor outlived its pretended device"
    return _devices[-1]


def place() -> str:
    """Returns file and line of the innermost frame in the sources; else of a test; else "torch"."""
    frame: Any = sys._getframe(1)
    test = None
    while frame is not None:
        name = frame.f_code.co_filename
        here = f"{name.removeprefix(f'{REPOSITORY}/')}:{frame.f_lineno}"
        if name.startswith(SOURCES):
            return here
        if test is None and name.startswith(TESTS) and name != __file__:
            test = here
        frame = frame.f_back
    return test or "torch"


def _mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Applies `function` to the tensors in arguments or results of an operation; much faster than torch's pytrees."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(function, part) for part in tree]) if tree else tree
    if isinstance(tree, dict):
        return {name: _mapped(function, part) for name, part in tree.items()}
    return tree


def _inner(tree: Any) -> Any:
    return _mapped(lambda tensor: tensor.numbers.tensor if isinstance(tensor, OnDevice) else tensor, tree)


def _outer(tree: Any) -> Any:
    return _mapped(lambda tensor: tensor if isinstance(tensor, OnDevice) else OnDevice(tensor), tree)


@cache
def _aliases(func: Any) -> bool:
    """Returns whether results of an operation share memory with its arguments."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation of which some tensors, or the `device` that it names, are of the pretended device."""
    name = func._schema.name.removeprefix("aten::")
    tensors: list[Tensor] = []
    _mapped(tensors.append, (args, kwargs))
    own = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    named = kwargs.get("device")
    asks = named is not None and torch.device(named).type == "cuda"
    if not own and not asks:
        if kwargs.get("pin_memory"):
            return _current().pin(func(*args, **(kwargs | {"pin_memory": False})))
        return func(*args, **kwargs)
    if torch.is_inference_mode_enabled() and func._can_decompose():
        with _Operations():  # without inference mode, autograd has done it
            return func.decompose(*args, **kwargs)
    device = _current()
    if asks:
        kwargs = kwargs | {"device": CPU}
    if name in COPIES:
        return _copy(name, func, args, kwargs, device)
    if not (asks and name.endswith("_like")):  # reads only the shape of its argument
        _refuse_mixed(func, name, args, tensors, device)
    if _waits(name, args):
        device.waited()
    if not func.is_view and name not in ALLOCATIONS and name != "_local_scalar_dense":
        device.counts.launches[place()] += 1
    result = func(*_inner(args), **_inner(kwargs))
    if name == "_local_scalar_dense":
        return result
    result = _outer(result)
    return return_and_correct_aliasing(func, args, kwargs, result) if own and _aliases(func) else result


def _copy(name: str, func: Any, args: Any, kwargs: dict[str, Any], device: Device) -> Any:
    """Copies between host and device, or on the device. `_ToHost` copies to the host: C++ sees tensors of the CPU."""
    source, target = (args[0], None) if name == "_to_copy" else (args[1], args[0])
    on_device = isinstance(source, OnDevice), target is None or isinstance(target, OnDevice)
    result = func(*_inner(args), **_inner(kwargs))
    if all(on_device):
        device.counts.launches[place()] += 1
    elif source.dim() or isinstance(source, OnDevice):  # a number of the CPU is an argument of a kernel
        non_blocking = bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:] and args[2]))
        host = target if on_device[0] else source
        device.copied(waits=not (non_blocking and device.is_pinned(host)))
    return _outer(result) if name == "_to_copy" else args[0]


def _refuse_mixed(func: Any, name: str, args: Any, tensors: list[Tensor], device: Device) -> None:
    """Raises MixedDevices. Numbers without dimensions may be of the CPU, and so may indices, which are copied."""
    other = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() and not tensor.is_meta]
    if not other:
        return
    if name in INDEXED and isinstance(args[0], OnDevice):
        indices = [index for index in args[1] if index is not None]
        for _ in (index for index in indices if not isinstance(index, OnDevice)):
            device.copied(waits=True)
        other = [tensor for tensor in other if all(tensor is not index for index in indices)]
    if other and torch._C._current_graph_task_id() == -1:  # in a backward pass C++ may have made it
        shape = tuple(other[0].shape)
        raise MixedDevices(f"{func}: a tensor {shape} of the CPU meets tensors of cuda:0 at {place()}")


def _waits(name: str, args: Any) -> bool:
    if name in INDEXED:
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        filled = name != "index" and len(indices) == 1 and args[2].numel() == 1  # torch calls masked_fill
        return bool(masks) and not filled
    return name in WAITS


class _Operations(TorchDispatchMode):
    """Operations whose tensors are of the CPU but that name the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that reach C++ without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(kwargs.get("device")) is int:  # the number of an accelerator, which C++ would look up
            kwargs = kwargs | {"device": CUDA}
        if func is torch.tensor and not isinstance(args[0], Tensor):
            args = (_mapped(lambda tensor: tensor.tolist(), args[0]), *args[1:])  # reads each of them
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and str(kwargs.get("device")).startswith("cuda"):
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            if isinstance(made, OnDevice):
                return made
            _current().copied(waits=True)
            return OnDevice(made)
        if func is torch.Tensor.pin_memory:
            return _current().pin(args[0].clone())
        if func is torch.Tensor.is_pinned and not isinstance(args[0], OnDevice):
            return _current().is_pinned(args[0])
        if func is torch.Tensor.to:  # C++ would look up the number of the current device
            args = tuple(CUDA if isinstance(arg, str | torch.device) and str(arg) == "cuda" else arg for arg in args)
        if getattr(func, "__name__", "") == "cuda" and args and type(args[0]) is not OnDevice:
            return args[0].to(CUDA)
        return func(*args, **kwargs)


class _Stream:
    """A stream, and an event of one, whose work has always ended."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> _Stream:
        return self

    def wait(self, *_: object) -> None: ...

    def is_capturing(self) -> bool:
        return False

    record = query = wait


class _Generator(torch.Generator):
    """Draws the numbers of the CPU."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)  # type: ignore[no-any-return]


class _Properties:
    name, uuid, total_memory, major, minor, multi_processor_count = "pretended", "GPU-0", MEMORY, 9, 0, 132


def _waiting(*_: object) -> None:
    _current().waited()


def _patches(device: Device) -> dict[str, Any]:
    """Names of `torch.cuda`."""
    stream = _Stream()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda *_: None,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_properties": lambda *_: _Properties,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: _Properties.name,
        "default_generators": (torch.default_generator,),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_rng_state_all": list,
        "manual_seed": torch.manual_seed,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: stream,
        "stream": lambda *_: nullcontext(),
        "synchronize": _waiting,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: device.allocated(),
        "memory_reserved": lambda *_: device.allocated(),
        "mem_get_info": lambda *_: (MEMORY - device.allocated(), MEMORY),
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
    }


@contextmanager
def pretended_device() -> Iterator[Device]:
    """Context manager in which torch has the pretended device. Its tensors must not be used afterwards."""
    device = Device()
    autocast = torch.amp.autocast_mode.autocast.__init__

    def autocast_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    with ExitStack() as stack:
        for name, value in _patches(device).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
            if "rng_state" in name:  # some callers name the module where it is defined
                stack.enter_context(patch.object(torch.cuda.random, name, value))
        stack.enter_context(patch.object(torch.amp.autocast_mode.autocast, "__init__", autocast_on_cpu))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        # torch built for CPUs has no streams and no flash attention; the build for GPUs has both
        stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda *_: _Stream()))
        stack.enter_context(patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: False))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        _devices.append(device)
        stack.callback(_devices.pop)
        stack.enter_context(_Operations())
        stack.enter_context(_Functions())
        yield device


def in_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function for other threads of the block, which have no modes of torch of their own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Operations(), _Functions():
            return function(*args, **kwargs)

    return run
