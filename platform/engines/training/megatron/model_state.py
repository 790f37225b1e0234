"""Parameters and optimizer state of a Megatron model under the names of whole tensors.

Names and format are those of the fsdp backend, so each backend can load the state of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_platform.engines.training.megatron.process_groups import ProcessGroups
from rl_platform.engines.training.megatron.weight_map import TensorSource, join, placed, split
from rl_platform.engines.training.sharded_state import MOMENTS, ShardedState, ShardedTensor, adam_state

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer

HEAD, EMBEDDING = "model.head.weight", "model.backbone.embed_tokens.weight"
VALUES = "values"


@dataclass(frozen=True)
class Master:
    """This rank's part [start:stop] of a flattened parameter: its float32 values and its optimizer state, by key."""

    parts: dict[str, Tensor]
    start: int
    stop: int

    def is_all_of(self, parameter: Tensor) -> bool:
        """Returns whether the parameter itself is its float32 master."""
        values = self.parts[VALUES]
        return values.data_ptr() == parameter.data_ptr() and values.numel() == parameter.numel()


class ModelState:
    """Reads and writes the state of a model.

    `parameters`: this rank's parameters and buffers, with their sources; `optimizer`: Megatron's chain for them, None
    if they are frozen; `shapes`: of all whole tensors by name; `tied`: the output matrix is the embedding.
    """

    def __init__(
        self,
        parameters: list[tuple[Tensor, TensorSource]],
        optimizer: ChainedOptimizer | None,
        shapes: dict[str, torch.Size],
        groups: ProcessGroups,
        *,
        tied: bool,
    ) -> None:
        self.parameters, self.shapes, self.tied = parameters, shapes, tied
        # the last one is that of the experts
        self.optimizers = [] if optimizer is None else optimizer.chained_optimizers
        self.groups, self.pipeline = groups, groups.pipeline
        # sources, and whether they are parameters or buffers
        own = [(source, isinstance(tensor, nn.Parameter)) for tensor, source in parameters]
        self.stages = [self.pipeline.broadcast_object(own, stage) for stage in range(self.pipeline.size)]
        self.device = parameters[0][0].device

    def start_from(self, whole: dict[str, Tensor]) -> None:
        """Loads the parameters that are made of these whole tensors; every rank has the same ones.

        The masters of half-precision parameters get full precision.
        """
        for parameter, source in self.parameters:
            if not all(name in whole for name in source.names):
                continue
            tensors = [whole[name].to(self.device) for name in source.names]
            part = split(source, self.groups.sharing(source).rank, parameter.shape, tensors)
            parameter.data.copy_(part)
            if (master := self._master(parameter)) is not None:
                master.parts[VALUES].view(-1).copy_(part.view(-1)[master.start : master.stop])

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of all parameters in float32 on every rank."""
        tensors = {name: tensor for names, tensor in self.gathered() for name in names}
        return {name: tensors[name] for name in self.shapes}

    def sharded(self) -> ShardedState:
        """Returns this rank's float32 masters and moments as parts of whole tensors, and buffers."""
        state: ShardedState = {}
        for parameter, source in self.parameters:
            is_buffer = not isinstance(parameter, nn.Parameter)
            if not (parameter.requires_grad or is_buffer):
                continue
            names = [self._stored(name) for name in source.names]
            shapes = [self.shapes[name] for name in names]
            # a tied output matrix on another stage than the embedding is not saved
            written = not (self.tied and source.names == (HEAD,))
            place = partial(placed, source, self.groups.sharing(source).rank, parameter.shape, shapes)
            if is_buffer:
                state[f"model.{names[0]}"] = ShardedTensor.of(parameter)
                continue
            for name, shape in zip(names, shapes, strict=True):
                state.setdefault(f"model.{name}", ShardedTensor(shape))
                state.setdefault(f"optimizer.{name}.step", ShardedTensor(()))
                for key in MOMENTS:
                    state.setdefault(f"optimizer.{name}.{key}", ShardedTensor(shape))
            master = self._master(parameter)
            if master is None or not master.is_all_of(parameter):
                for index, offsets, part in place(parameter.data):
                    state[f"model.{names[index]}"].add(offsets, part, written=False)
            if master is None:
                continue
            for key in (VALUES, *MOMENTS):
                for index, offsets, part in place(master.parts[key], master.start):
                    name = f"model.{names[index]}" if key == VALUES else f"optimizer.{names[index]}.{key}"
                    state[name].add(offsets, part, written)
            for name in names:
                state[f"optimizer.{name}.step"].add((), master.parts["step"], written)
        return state

    def _stored(self, name: str) -> str:
        """Returns the name under which a tensor is saved: a tied output matrix is the embedding."""
        return EMBEDDING if self.tied and name == HEAD else name

    def gathered(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yields (names, copy of the whole parameter) one by one, on every rank. Buffers stay in float32."""
        for stage, sources in enumerate(self.stages):
            for index, (source, is_parameter) in enumerate(sources):
                if self.tied and source.names == (HEAD,):
                    continue
                sent = dtype if is_parameter else torch.float32
                if stage == self.pipeline.rank:
                    parts = self._parts_of_ranks(self.parameters[index][0], source, sent)
                    whole = join(source, parts, [self.shapes[name] for name in source.names])
                    del parts
                else:
                    whole = [torch.empty(self.shapes[name], dtype=sent, device=self.device) for name in source.names]
                for name, tensor in zip(source.names, whole, strict=True):
                    names = [other for other in self.shapes if self._stored(other) == name]
                    yield names, self.pipeline.broadcast(tensor, stage)

    def _parts_of_ranks(self, parameter: Tensor, source: TensorSource, dtype: torch.dtype) -> list[Tensor]:
        part = parameter.detach().to(dtype, copy=True)
        return [part] if source.sharing == "replicated" else self.groups.sharing(source).gather(part)

    def _master(self, parameter: Tensor) -> Master | None:
        """Returns this rank's master of a parameter; None if other data-parallel ranks hold it or it is not trained."""
        if not self.optimizers or not parameter.requires_grad:
            return None
        start, stop = 0, parameter.numel()
        optimizer = self.optimizers[0 if getattr(parameter, "allreduce", True) else -1]  # Megatron marks experts
        if hasattr(optimizer, "model_param_group_index_map"):  # data-parallel ranks shard its state
            if parameter not in optimizer.model_param_group_index_map:
                return None
            values = getattr(parameter, "main_param", None)  # of a half-precision parameter
            if values is None:
                group, _ = optimizer.model_param_group_index_map[parameter]
                same = [one is parameter for one in optimizer.model_fp32_groups[group]]
                values = optimizer.shard_fp32_groups[group][same.index(True)]
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            start, stop = owned.start, owned.end
        else:
            values = getattr(parameter, "main_param", parameter)
        return Master({VALUES: values.data, **adam_state(optimizer.optimizer, values)}, start, stop)
