"""Serialisation of calls, results and messages: large arrays and tensors stay beside the pickled rest, uncopied.

The buffers may live in shared memory: `unpack(copy=False)` makes arrays and tensors on top of them, which must not be
written to; `copy=True` gives the receiver its own. Tensors on an accelerator are copied through main memory.
`References` decides which objects are sent by name instead of by value (channels, published weights).
"""

from __future__ import annotations

import io
import pickle
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch

from rl_platform.errors import PlatformError, WorkerError, message_of

IN_BAND = 4096  # bytes: smaller buffers are copied into the pickle, which is cheaper than handling them apart
SHARED = 96 * 1024  # bytes: larger messages are put into the object store, which Ray does by itself from 100 KiB on

Buffer = bytes | bytearray | memoryview | pickle.PickleBuffer
Answer = tuple[Any, bytes | None]  # of a call to another process: a value, or a packed error

_READER = threading.local()

# Tensors cannot be read-only; the documentation of `unpack` forbids writing to received ones.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True)
class Packed:
    """A pickled object and the large buffers it refers to."""

    data: Buffer
    buffers: Sequence[Buffer]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(buffer).nbytes for buffer in (self.data, *self.buffers))


class References(Protocol):
    """Objects that are sent by name: `token` returns the name that is sent, `resolve` the receiver's object."""

    def token(self, value: object) -> object | None: ...

    def resolve(self, token: object) -> object: ...


class NoReferences:
    """No object is sent by name."""

    def token(self, value: object) -> None:
        return None

    def resolve(self, token: object) -> object:
        raise WorkerError(f"a reference among plain values: {token}")


NO_REFERENCES = NoReferences()


def pack(value: object, references: References) -> Packed:
    """Raises pickle's error for objects that cannot be serialised."""
    buffers: list[pickle.PickleBuffer] = []

    def place(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < IN_BAND:
            return True
        buffers.append(buffer)
        return False

    stream = io.BytesIO()
    _MessagePickler(stream, references, place).dump(value)
    return Packed(stream.getvalue(), buffers)


def unpack(packed: Packed, references: References, copy: bool) -> Any:
    """Returns the object again. Its references are resolved in the calling thread and may wait for another process."""
    buffers = [bytearray(buffer) for buffer in packed.buffers] if copy else packed.buffers
    outer = getattr(_READER, "references", None)
    _READER.references = references
    try:
        return pickle.loads(packed.data, buffers=buffers)
    finally:
        _READER.references = outer


def pack_error(error: BaseException) -> bytes:
    """Returns an error with its notes and, if it can be pickled, its cause."""
    cause = error.__cause__
    for candidate in ((error, cause), (error, None)):
        try:
            data: bytes = cloudpickle.dumps(candidate)
            pickle.loads(data)  # an exception with arguments of its own may pickle and yet not be read
        except Exception:
            continue
        return data
    data = cloudpickle.dumps((WorkerError(f"{type(error).__name__}: {message_of(error)}"), None))
    return data


def unpack_error(data: bytes) -> BaseException:
    """Returns the error that `pack_error` packed. Raises nothing: an error of a class that does not exist here becomes
    WorkerError."""
    try:
        error, cause = pickle.loads(data)
    except Exception as failure:
        return WorkerError(f"an error arrived that cannot be read here: {failure}")
    if not isinstance(error, PlatformError | ValueError):
        return WorkerError(f"{type(error).__name__}: {message_of(error)}")
    error.__cause__ = cause
    return error


def value_of(answer: Answer) -> Any:
    """Returns the value, or raises the error."""
    value, failure = answer
    if failure is not None:
        raise unpack_error(failure)
    return value


class _MessagePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, stream: io.BytesIO, references: References, place: Callable[[pickle.PickleBuffer], bool]
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=place)
        self._references = references
        self._sent: dict[Hashable, np.ndarray] = {}  # tensors over the same memory are sent once

    def reducer_override(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return _tensor, self._bytes_of(value)
        token = self._references.token(value)
        if token is not None:
            return _resolve, (pickle.dumps(token),)
        return super().reducer_override(value)

    def _bytes_of(self, tensor: torch.Tensor) -> tuple[np.ndarray, str, tuple[int, ...]]:
        name, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        key = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), tensor.device)
        if not tensor.numel() or key not in self._sent:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self._sent[key] = flat.view(torch.uint8).numpy()
        return self._sent[key], name, shape


def _resolve(token: bytes) -> object:
    return _READER.references.resolve(pickle.loads(token))


def _tensor(raw: np.ndarray, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name)
    return torch.from_numpy(raw).view(dtype).view(shape) if raw.size else torch.empty(shape, dtype=dtype)
