"""Weights in memory that another process reads: handed over as handles, not as bytes.

If shared memory is too small for them, they are written to a file.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

SPARE = 16 * 2**20  # bytes of shared memory that are left to others
SHARED_MEMORY = Path("/dev/shm")
DEVICE = 6  # index of the device in the arguments that torch sends for a tensor on a GPU
_sharing = threading.Lock()
_mapped: dict[str, Tensor] = {}  # by name: the shared tensors of the last `load`


class SharedWeights:
    """Memory for one set of weights, allocated at the first `write`. If the same tensors are sent again, as those of a
    learner in this process, their storage is moved into shared memory. From then on nothing is copied, and this memory
    is released."""

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}
        self._last: dict[str, int] = {}  # by name: where the tensors of the last `write` were

    def write(self, state: Mapping[str, Tensor], copies: int) -> list[bytes]:
        """Returns the handles of [(name, tensor)] `copies` times. Each process that reads takes one of them, and reads
        before the tensors change again.

        Tensors on a CPU are copied into shared memory, or lie there; those on a GPU are handed over as they are, by
        CUDA IPC.
        """
        on_host = {name: tensor.detach() for name, tensor in state.items() if tensor.device.type == "cpu"}
        if self._lasting(on_host):
            self._views = {}
            with _by_name():
                for tensor in on_host.values():
                    tensor.untyped_storage().share_memory_()
        self._last = {name: tensor.data_ptr() for name, tensor in on_host.items()}
        shown = on_host
        if not all(tensor.is_shared() for tensor in on_host.values()):
            shown = self._views = self._views or _views(on_host)
            for name, view in shown.items():
                view.copy_(on_host[name])
        named = [(name, shown.get(name, tensor.detach())) for name, tensor in state.items()]
        return [_handles(named) for _ in range(copies)]

    def _lasting(self, state: Mapping[str, Tensor]) -> bool:
        """Returns whether these are the very tensors of the last `write`, with room to move them."""
        if not self._views or self._last != {name: tensor.data_ptr() for name, tensor in state.items()}:
            return False
        return _free(sum(tensor.nbytes for tensor in state.values()))

    def has_room(self, state: Mapping[str, Tensor]) -> bool:
        """Returns whether shared memory can hold what `write` would put there; it is a process's end if it cannot."""
        if self._views:
            return True
        tensors = (tensor for tensor in state.values() if tensor.device.type == "cpu" and not tensor.is_shared())
        return _free(sum(tensor.nbytes for tensor in tensors))


def load(model: object, named: Sequence[tuple[str, Tensor]]) -> None:
    """Loads weights in SGLang's process. Shared memory stays mapped until the same names are sent again: mapping and
    releasing it takes longer than copying its contents. Handles of a GPU are released at once."""
    model.load_weights(named)
    _mapped.update((name, tensor) for name, tensor in named if tensor.device.type == "cpu")


def _free(needed: int) -> bool:
    return not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free > needed + SPARE


def write_folder(state: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the tensors as the weights of a Hugging Face folder. Of those that share their memory it writes the first:
    readers tie the others to it."""
    from safetensors.torch import save_file

    distinct = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}
    whole = {name: state[name].detach().contiguous() for name in distinct.values()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def _views(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns equal tensors without content in one block of shared memory, each at a multiple of 64 bytes."""
    starts, end = {}, 0
    for name, tensor in state.items():
        starts[name], end = end, end + -(-tensor.nbytes // 64) * 64
    with _by_name():
        memory = torch.empty(end, dtype=torch.uint8).share_memory_()
    return {
        name: memory[start : start + state[name].nbytes].view(state[name].dtype).view(state[name].shape)
        for name, start in starts.items()
    }


def _handles(tensors: list[tuple[str, Tensor]]) -> bytes:
    buffer = io.BytesIO()
    with _by_name():
        _Handles(buffer).dump(tensors)
    return buffer.getvalue()


class _Handles(ForkingPickler):
    """Identifies a GPU by its UUID, as SGLang reads it: numbers depend on the GPUs that a process sees."""

    def reducer_override(self, value: object) -> object:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, sent = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(sent[DEVICE]).uuid)
        return rebuild, (*sent[:DEVICE], uuid, *sent[DEVICE + 1 :])


class _by_name:
    """Shared memory with names: torch's file descriptors reach only processes that multiprocessing started."""

    def __enter__(self) -> None:
        _sharing.acquire()
        self._before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self._before)
        _sharing.release()
