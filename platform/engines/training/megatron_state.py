"""Parameters and optimizer state of a Megatron model as whole tensors by name, whatever the ranks share.

The names and the form are those of the other training backend, so either goes on from what the other has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_platform.engines.training.megatron_weights import Source
from rl_platform.errors import CheckpointError

HEAD, EMBEDDING = "model.head.weight", "model.backbone.embed_tokens.weight"
VALUES, MOMENTS = "values", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Group:
    """A process group as this rank sees it; `handle` None: it is alone."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, handle: dist.ProcessGroup) -> Group:
        size = handle.size()
        return cls(handle if size > 1 else None, handle.rank(), size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.handle is not None:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, equally shaped."""
        if self.handle is None:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor.contiguous(), group=self.handle)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """What rank `source` of the group holds, in place."""
        if self.handle is not None:
            dist.broadcast(tensor, group=self.handle, group_src=source)
        return tensor

    def broadcast_object(self, value: Any, source: int) -> Any:
        """What rank `source` of the group holds."""
        if self.handle is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.handle, group_src=source)
        return box[0]


@dataclass(frozen=True)
class Groups:
    """A rank's groups. `expert`: ranks that hold different experts of its layers; `expert_data`: the same ones."""

    tensor: Group
    pipeline: Group
    data: Group
    expert: Group
    expert_data: Group

    @classmethod
    def of_megatron(cls) -> Groups:
        from megatron.core import parallel_state

        return cls(
            Group.of(parallel_state.get_tensor_model_parallel_group()),
            Group.of(parallel_state.get_pipeline_model_parallel_group()),
            Group.of(parallel_state.get_data_parallel_group()),
            Group.of(parallel_state.get_expert_model_parallel_group()),
            Group.of(parallel_state.get_expert_data_parallel_group()),
        )

    def sharing(self, source: Source) -> Group:
        """The ranks that share what comes from `source`."""
        return self.expert if source.sharing == "experts" else self.tensor


@dataclass(frozen=True)
class Master:
    """This rank's part [start:stop] of a flattened parameter: its float32 values and its optimizer state, by key."""

    parts: dict[str, Tensor]
    start: int
    stop: int


class ModelState:
    """`parameters`: this rank's, with their sources; `shapes`: of all whole tensors, by name; `tied`: the output matrix
    is the embedding. `optimizer`: Megatron's chain of them, of those parameters."""

    def __init__(
        self,
        parameters: list[tuple[nn.Parameter, Source]],
        optimizer: Any,
        shapes: dict[str, torch.Size],
        groups: Groups,
        *,
        tied: bool,
    ) -> None:
        self.parameters, self.shapes, self.tied = parameters, shapes, tied
        self.optimizers = optimizer.chained_optimizers  # of the experts: the last one
        self.groups, self.pipeline = groups, groups.pipeline
        self.world = Group(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        if self.world.size == 1:
            self.world = Group(None, 0, 1)
        own = [source for _, source in parameters]
        self.stages = [self.pipeline.broadcast_object(own, stage) for stage in range(self.pipeline.size)]
        self.device = parameters[0][0].device

    def start_from(self, whole: dict[str, Tensor]) -> None:
        """Take over parameters that every rank has. Those in half precision keep the rest in their master copies."""
        for parameter, source in self.parameters:
            self._load_parameter(parameter, source, [whole[name].to(self.device) for name in source.names])

    def weights(self) -> dict[str, Tensor]:
        """Copies of all parameters in float32 on every rank."""
        return self._named(dict(self._whole(lambda own: own.detach().to(torch.float32, copy=True))))

    def state_dict(self) -> dict[str, Any]:
        """Parameters and moments of the optimizer in float32 on the CPU of rank 0; empty elsewhere."""
        model, *found = (
            self._kept(lambda parameter, key=key: self._unsharded(parameter, key)) for key in (VALUES, *MOMENTS)
        )
        moments = dict(zip(MOMENTS, found, strict=True))
        own = [master for master in self._masters() if master is not None]
        step = own[0].parts["step"].detach().cpu() if own else torch.zeros(())
        adam = self.optimizers[0].optimizer
        options = {name: adam.param_groups[0][name] for name in adam.defaults}
        names = list(moments["exp_avg"])
        state = {name: {"step": step.clone(), **{key: moments[key][name] for key in MOMENTS}} for name in names}
        groups = [{**options, "params": names}]
        return {"model": self._named(model), "optimizer": {"state": state, "param_groups": groups}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over rank 0's `state`. Raises CheckpointError if it is of another model."""
        problem = self._problem_with(state) if self.world.rank == 0 else None
        if problem := self.world.broadcast_object(problem, 0):
            raise CheckpointError(f"this state cannot be loaded: {problem}")
        mine = self.world.rank == 0
        optimizer = state["optimizer"] if mine else {"state": {}, "param_groups": []}
        model = state["model"] if mine else {}
        step = float(next(iter(optimizer["state"].values()))["step"]) if mine and optimizer["state"] else 0.0
        rate = optimizer["param_groups"][0]["lr"] if mine else 0.0
        step, rate = self.world.broadcast_object((step, rate), 0)
        for group in (group for optimizer in self.optimizers for group in optimizer.optimizer.param_groups):
            group["lr"] = rate
        for stage, sources in enumerate(self.stages):
            for index, source in enumerate(sources):
                own = self.parameters[index][0] if stage == self.pipeline.rank else None
                whole = self._sent([model[name] for name in source.names] if mine else None, source)
                if own is not None:
                    self._load_parameter(own, source, whole)
                for key in MOMENTS:
                    tensors = [optimizer["state"][self._stored(name)][key] for name in source.names] if mine else None
                    whole = self._sent(tensors, source)
                    if own is not None:
                        self._load(own, source, whole, key)
        for master in self._masters():
            if master is not None:
                master.parts["step"].fill_(step)

    def _sent(self, tensors: list[Tensor] | None, source: Source) -> list[Tensor]:
        """Rank 0's whole tensors of a source, on every rank. A copy: nothing that was loaded is trained in place."""
        if tensors is None:
            tensors = [torch.empty(self.shapes[name]) for name in source.names]
        copies = [tensor.detach().to(self.device, torch.float32, copy=True).contiguous() for tensor in tensors]
        return [self.world.broadcast(tensor, 0) for tensor in copies]

    def _load_parameter(self, own: nn.Parameter, source: Source, whole: list[Tensor]) -> None:
        own.data.copy_(source.split(whole, self.groups.sharing(source).rank))
        self._load(own, source, whole, VALUES)

    def _load(self, own: nn.Parameter, source: Source, whole: list[Tensor], key: str) -> None:
        master = self._master(own)
        if master is not None:
            part = source.split(whole, self.groups.sharing(source).rank).reshape(-1)
            master.parts[key].view(-1).copy_(part[master.start : master.stop])

    def _problem_with(self, state: dict[str, Any]) -> str | None:
        found = {name: tensor.shape for name, tensor in state["model"].items()}
        if missing := sorted(self.shapes.keys() - found.keys()):
            return f"{missing[0]} is missing: it is of another model"
        for name, shape in self.shapes.items():
            if found[name] != shape:
                return f"{name} has the shape {tuple(found[name])} and not {tuple(shape)}: it is of another model"
        return None

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the model's own order, the tied output matrix under both of its names."""
        return {name: tensors[self._stored(name)] for name in self.shapes if self._stored(name) in tensors}

    def _stored(self, name: str) -> str:
        return EMBEDDING if self.tied and name == HEAD else name

    def _kept(self, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in self._whole(of):  # every rank takes part, one keeps
            if self.world.rank == 0:
                found[name] = tensor.cpu()
        return {name: found[name] for name in self.shapes if name in found}

    def _whole(self, of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, on every rank, from what `of` gives for each of its own parameters."""
        for stage, sources in enumerate(self.stages):
            for index, source in enumerate(sources):
                if self.tied and source.names == (HEAD,):
                    continue
                if stage == self.pipeline.rank:
                    part = of(self.parameters[index][0])
                    parts = [part] if source.sharing == "replicated" else self.groups.sharing(source).gather(part)
                    whole = [tensor.contiguous() for tensor in source.join(parts)]
                else:
                    whole = [torch.empty(self.shapes[name], device=self.device) for name in source.names]
                for name, tensor in zip(source.names, whole, strict=True):
                    yield name, self.pipeline.broadcast(tensor, stage)

    def _unsharded(self, parameter: nn.Parameter, key: str) -> Tensor:
        """[parameter.shape] from the parts that the data-parallel ranks hold; never the live tensor."""
        flat = torch.zeros(parameter.numel(), device=self.device)
        master = self._master(parameter)
        if master is not None:
            flat[master.start : master.stop] = master.parts[key].detach().view(-1)
        if _shared_by_data_ranks(self._optimizer(parameter)):
            (self.groups.expert_data if is_expert(parameter) else self.groups.data).sum(flat)
        return flat.view(parameter.shape)

    def _optimizer(self, parameter: nn.Parameter) -> Any:
        return self.optimizers[-1 if is_expert(parameter) else 0]

    def _masters(self) -> list[Master | None]:
        return [self._master(parameter) for parameter, _ in self.parameters]

    def _master(self, parameter: nn.Parameter) -> Master | None:
        """None: other data-parallel ranks hold all of it."""
        start, stop = 0, parameter.numel()
        optimizer = self._optimizer(parameter)
        if _shared_by_data_ranks(optimizer):
            if parameter not in optimizer.model_param_group_index_map:
                return None
            group, order = optimizer.model_param_group_index_map[parameter]
            values = optimizer.optimizer.param_groups[group]["params"][order]
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            start, stop = owned.start, owned.end
        else:
            values = getattr(parameter, "main_param", parameter)
        state = optimizer.optimizer.state[values]
        if not state:  # as Adam makes it at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=values.device)
            state.update({key: torch.zeros_like(values) for key in MOMENTS})
        return Master({VALUES: values.data, **state}, start, stop)


def is_expert(parameter: nn.Parameter) -> bool:
    """By Megatron's own mark."""
    return not getattr(parameter, "allreduce", True)


def _shared_by_data_ranks(optimizer: Any) -> bool:
    """Megatron's distributed optimizer."""
    return hasattr(optimizer, "model_param_group_index_map")
