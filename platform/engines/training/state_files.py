"""Writes and reads sharded training state with torch.distributed.checkpoint.

Each rank writes one file with its parts; parts that several ranks hold are written once. The name of a tensor and the
offsets in it identify a part, so any other layout can read the state. Nothing is gathered: a rank holds its own state
and one part that it is reading.

Not covered: names and parts, which the engines define, and the integrity of files, which the manifest verifies.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rl_platform.checkpoint.verify import Written
from rl_platform.checkpoint.write import HashingWriter
from rl_platform.disk import sync
from rl_platform.engines.training.sharded_state import ShardedState, ShardedTensor
from rl_platform.errors import CheckpointError


def write(state: ShardedState, folder: str | Path) -> dict[str, Written]:
    """Writes the parts of every rank into `folder` and returns this rank's files.

    Raises CheckpointError on every rank if one of them cannot write.
    """
    writer = _Writer(Path(folder))
    with _collective("written to", folder) as alone:
        dcp.save(dict.fromkeys(state), storage_writer=writer, planner=_SavePlanner(state), no_dist=alone)
    return writer.files.written


def read(state: ShardedState, folder: str | Path) -> None:
    """Fills the parts of every rank from `folder`, which any layout may have written.

    Raises CheckpointError on every rank if names or shapes differ from those of the files, or a file cannot be read.
    """
    reader = _Reader(Path(folder))
    with _collective("read from", folder) as alone:
        if alone:
            reader.read_metadata()  # torch would log its error with a traceback; several ranks fail together in `load`
        dcp.load(dict.fromkeys(state), storage_reader=reader, planner=_LoadPlanner(state), no_dist=alone)


def read_whole(folder: str | Path, prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors in `folder` whose names begin with `prefix`, whole, in this process only.

    Any layout of any engine may have written them. Raises CheckpointError if a file cannot be read.
    """
    tensors = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in _Reader(Path(folder)).read_metadata().state_dict_metadata.items()
        if name.startswith(prefix)
    }
    state = {name: ShardedTensor.of(tensor) for name, tensor in tensors.items()}
    planner = _LoadPlanner(state, all_of_it=not prefix)
    with _collective("read from", folder):
        dcp.load(dict.fromkeys(state), storage_reader=_Reader(Path(folder)), planner=planner, no_dist=True)
    return tensors


@contextmanager
def _collective(action: str, folder: str | Path) -> Iterator[bool]:
    """Turns an error of any rank into a CheckpointError. Yields whether this is the only rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a single rank
            yield not dist.is_initialized() or dist.get_world_size() == 1
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):  # Ctrl-C
            raise cause from None
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise CheckpointError(f"state cannot be {action} {folder}, says rank {rank}: {reason}") from cause


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, state: ShardedState) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.own = state

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), part.shape),
                    TensorProperties.create_from_tensor(part),
                    torch.Size(sharded.shape),
                ),
            )
            for name, sharded in self.own.items()
            for offsets, part in sharded.parts
            if part.numel()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return next(part for offsets, part in self.own[index.fqn].parts if offsets == index.offset)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, state: ShardedState, *, all_of_it: bool = True) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.own, self.all_of_it = state, all_of_it

    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, sharded in self.own.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if saved is None:
                raise ValueError(f"{name} is missing: it is of another model")
            assert isinstance(saved, TensorStorageMetadata)
            if tuple(saved.size) != tuple(sharded.shape):
                shapes = f"has the shape {tuple(saved.size)} and not {tuple(sharded.shape)}"
                raise ValueError(f"{name} {shapes}: it is of another model")
            wanted = [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in sharded.destinations]
            reads = create_read_items_for_chunk_list(name, saved, wanted)
            if sum(math.prod(item.lengths) for item in reads) != sum(math.prod(chunk.sizes) for chunk in wanted):
                raise ValueError(f"parts of {name} are missing")
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        read = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        if self.all_of_it and (unread := sorted(self.metadata.state_dict_metadata.keys() - read)):
            raise ValueError(f"{unread[0]} is not in this model: it is of another one")
        return global_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        part: Tensor = self.own[index.fqn].destinations[index.index][1]
        return part


class _Files(FileSystem):
    """A file system that records hashes of written files and the error of a failed write."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}
        self.error: BaseException | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[object]:
        with open(path, mode) as file:
            if mode != "wb":
                yield file
                return
            with ThreadPoolExecutor(1) as pool:
                writer = HashingWriter(cast(BinaryIO, file), pool)
                try:
                    yield writer
                finally:
                    self.error = writer.error
                sync(file)
                self.written[Path(path).name] = writer.written

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # `_Files` syncs
        self.fs = self.files = _Files()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without path and random id, so that equal states give equal files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._real_error():
            results: Future[list[WriteResult]] = super().write_data(plan, planner)
            return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._real_error():
            super().finish(metadata, results)

    @contextmanager
    def _real_error(self) -> Iterator[None]:
        """Raises the error of the file where torch would raise its own."""
        try:
            yield
        except RuntimeError:
            if self.files.error is not None:
                raise self.files.error from None
            raise


class _Reader(dcp.FileSystemReader):
    def read_metadata(self) -> Metadata:
        """Returns the files' index. Raises CheckpointError if it is unreadable or names files outside the folder."""
        path = self._get_metadata_path()
        try:
            with open(path, "rb") as file:
                metadata: Metadata = _PlainUnpickler(file).load()
            tensors, places = metadata.state_dict_metadata, metadata.storage_data
            plain = all(isinstance(saved, TensorStorageMetadata) for saved in tensors.values())
            inside = all(re.fullmatch(r"\w[\w.-]*", place.relative_path) for place in places.values())
        except Exception as error:  # of any type, as pickle builds the index
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path} cannot be read: {reason}") from error
        if not (plain and inside):
            raise CheckpointError(f"{path} names other values than tensors, or files outside its folder")
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles only names, shapes and offsets, so that reading never runs code from the file."""

    CLASSES: Mapping[tuple[str, str], object] = {
        (cls.__module__, cls.__qualname__): cls
        for cls in (
            _MEM_FORMAT_ENCODING,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
            _StorageInfo,
            torch.Size,
            torch.serialization._get_layout,
        )
    }

    def find_class(self, module: str, name: str) -> object:
        if (cls := self.CLASSES.get((module, name))) is not None:
            return cls
        if module == "torch" and isinstance(cls := getattr(torch, name, None), torch.dtype):
            return cls
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
