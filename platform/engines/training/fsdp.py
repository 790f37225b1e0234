"""Training with plain torch on one rank and FSDP2 (sharded parameters, gradients and optimizer state) on several.

Every rank gets the same mini-batch and computes its share of the rows. Denominators need no communication, because each
rank has all masks. FSDP averages gradients over ranks; multiplying local losses by the number of ranks makes it a sum.
torch.distributed.checkpoint takes a second to import, so it is imported only where whole weights are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_platform.algorithms.action_levels import denominators_of
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics, Sums
from rl_platform.config.schema.models import Optim
from rl_platform.device_copy import on_device
from rl_platform.engines.training.base import Loss, MicroBatches, Offloadable
from rl_platform.engines.training.sharded_state import ShardedState, ShardedTensor, adam_state
from rl_platform.engines.training.sharing import (
    Group,
    balance_metrics_of,
    group_along,
    hidden_size_of,
    over_ranks,
    part_of,
    shares,
)
from rl_platform.extras import required
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from rl_platform.models.experts.balancing_loss import BalancedRouters
    from rl_platform.models.forward import TokenModel

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


class FSDPEngine:
    """Trains `model`, an nn.Module from `RolloutBatch` to `ModelOutputs`.

    With several ranks the default process group must hold exactly the ranks of this model. Parameters with
    requires_grad False are frozen: neither the optimizer nor the state has them. A model with only frozen parameters
    can be evaluated but not stepped.

    horizon, nominal: see `Denominators.of`. balance: see `shares`. context: number of neighbouring ranks that split the
    tokens of their micro-batches. cpu_offload: parameters, gradients and optimizer state are in host memory, where the
    optimizer runs; a single rank then creates its own process group. router_aux_loss_coef: factor of the load-balancing
    loss of a mixture of experts.

    A language model with `pretrained` weights is filled from them after it is sharded, so that no rank holds all of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        *,
        dtype: torch.dtype,
        horizon: int,
        device: torch.device,
        nominal: bool = False,
        balance: bool = True,
        gradient_checkpointing: bool = False,
        context: int = 1,
        cpu_offload: bool = False,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.world_size: int = dist.get_world_size() if dist.is_initialized() else 1
        self.device, self.horizon, self.nominal, self.balance = device, horizon, nominal, balance
        self.data = _data_ranks(model, context)
        self.sharded = self.world_size > 1 or cpu_offload
        pretrained = getattr(getattr(model, "model", None), "pretrained", None)
        self.model = model if cpu_offload or pretrained is not None else model.to(device)
        if gradient_checkpointing:
            for layer in _layers(self.model):
                layer.forward = partial(_recomputed, layer.forward)
        if self.sharded:
            _shard(self.model, device, dtype, cpu_offload=cpu_offload)
        if pretrained is not None:
            _fill(self.model, pretrained, torch.device("cpu") if cpu_offload else device)
        self.routers = _balanced_routers(model, router_aux_loss_coef, self.world_size)
        self.precision = autocast(device, dtype)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.clip_grad = optim.clip_grad
        self.optimizer: torch.optim.AdamW | None = None
        if self.parameters:  # AdamW raises for an empty list
            self.optimizer = torch.optim.AdamW(
                self.parameters,
                lr=optim.lr,
                betas=optim.betas,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                fused=True,
            )
            # before any activation: moments allocated between activations would fragment the memory
            for parameter in self.parameters if device.type == "cpu" else ():
                adam_state(self.optimizer, parameter)

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        whole_outputs: dict[str, Tensor] = {}
        with self.precision:
            for rows in self._shares(batch, micro_batches):
                outputs = self.model(part_of(batch, rows).to(self.device))
                (index,) = on_device([torch.tensor(rows, dtype=torch.int64)], self.device)
                for name, tensor in vars(outputs).items():
                    if tensor is not None:
                        shape = (*batch.action_mask.shape, *tensor.shape[2:])
                        whole = whole_outputs.setdefault(name, torch.zeros(shape, device=self.device))
                        whole[index] = tensor[: len(rows)].float()
        for tensor in whole_outputs.values():
            self.data.sum(tensor)  # each row is computed on one rank and 0 on the others
        if self.sharded:
            cast("FSDPModule", self.model).reshard()  # a forward without backward leaves the outermost unit gathered
        return ModelOutputs(**{name: tensor.cpu() for name, tensor in whole_outputs.items()})

    def step(self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches) -> Metrics | None:
        assert self.optimizer is not None, "a model without trainable parameters cannot be stepped"
        denominators = denominators_of(mini_batch, self.horizon, nominal=self.nominal)
        metrics, total = Metrics(), torch.zeros((), device=self.device)
        for rows in self._shares(mini_batch, micro_batches):
            part = part_of(mini_batch, rows).to(self.device)
            if self.routers is not None:
                self.routers.begin(part, int(mini_batch.sample_mask.sum()))
            with self.precision:
                outputs = self.model(part, entropy=True)
            part_loss, part_metrics = loss(outputs, part, denominators if rows else replace(denominators, full=False))
            (part_loss * self.world_size if self.world_size > 1 else part_loss).backward()
            metrics, total = metrics.merge(part_metrics), total + part_loss.detach()
        self.data.sum(total)
        own: dict[str, Tensor] = {}
        if self.routers is not None:
            own["router_aux_loss"] = self.routers.finish(total)
        norm = self._clipped_gradient_norm()
        finite = bool(torch.isfinite(norm + total))  # a clipped ratio has no gradient and hides a loss that is NaN
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        if self.data.size > 1:
            balance = balance_metrics_of(mini_batch, self.data.size, hidden_size_of(self.model), self.balance)
            metrics = over_ranks(metrics, self.device, self.data).merge(balance)
        own["grad_norm"] = norm.detach()
        return metrics.merge(Metrics(means={(name,): Sums(value.reshape(1), 1.0) for name, value in own.items()}))

    def set_learning_rate(self, value: float) -> None:
        assert self.optimizer is not None, "a model without trainable parameters has no learning rate"
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def weights(self) -> dict[str, Tensor]:
        if not self.sharded:
            return {name: tensor.detach() for name, tensor in self.model.state_dict(keep_vars=True).items()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole: dict[str, Tensor] = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        return whole

    def gathered(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Sequence[str], Tensor]]:
        aliases: dict[int, tuple[list[str], Tensor]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            aliases.setdefault(id(tensor), ([], tensor))[0].append(name)
        for names, tensor in aliases.values():
            part = tensor.detach().to(dtype) if isinstance(tensor, nn.Parameter) else tensor
            yield names, part.full_tensor() if hasattr(part, "full_tensor") else part

    def sharded_state(self) -> ShardedState:
        state: ShardedState = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            if frozen or id(tensor) in seen:  # the same tensor under two names
                continue
            seen.add(id(tensor))
            state[f"model.{name}"] = ShardedTensor.of(tensor)
            if self.optimizer is not None and tensor.requires_grad:
                adam = adam_state(self.optimizer, tensor)
                state |= {f"optimizer.{name}.{key}": ShardedTensor.of(value) for key, value in adam.items()}
        return state

    def offloadable(self) -> Offloadable:
        parameters: list[Tensor] = [*self.model.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [] if self.optimizer is None else self.optimizer.state.values()
        values = [value for state in states for value in state.values()]
        return Offloadable(parameters, [value for value in values if isinstance(value, Tensor)], gradients)

    def _shares(self, batch: RolloutBatch, micro_batches: MicroBatches) -> Sequence[Sequence[int]]:
        width = hidden_size_of(self.model)
        return shares(batch, micro_batches, self.data.rank, self.data.size, width, self.balance)

    def _clipped_gradient_norm(self) -> Tensor:
        """Returns the norm of all gradients [], before it clips them to `clip_grad`."""
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if hasattr(norm, "full_tensor"):  # the norm of sharded gradients
            norm = norm.full_tensor()
        if self.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_grad, norm)
        return norm


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Returns a context in which forward passes compute in `dtype`; parameters stay float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@torch.no_grad()
def _fill(model: nn.Module, parts: Iterable[Mapping[str, Tensor]], device: torch.device) -> None:
    """Allocates this rank's share of a model on the meta device, and copies it from the parts of the whole model."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    state = model.state_dict(keep_vars=True)
    for part in parts:
        _copy(part, state)


def _copy(part: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies this rank's share of the whole tensors in `part` into `state`."""
    for name, whole in part.items():
        for offsets, share in ShardedTensor.of(state[f"model.{name}"]).parts:
            place = zip(offsets, share.shape, strict=True)
            share.copy_(whole[tuple(slice(start, start + size) for start, size in place)])


def _layers(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers of a model: decoder layers, and those of a vision tower."""
    return [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]


def _recomputed(forward: Callable[Arguments, Output], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Output:
    """Runs `forward` with gradient checkpointing: it stores only its inputs and runs again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    output: Output = checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
    return output


def _balanced_routers(model: nn.Module, coefficient: float, world_size: int) -> BalancedRouters | None:
    """Returns the routers that add a load-balancing loss with this coefficient; None without one."""
    if not coefficient:
        return None
    with required("rl_platform.models.experts", "router_aux_loss_coef"):
        from rl_platform.models.experts.balancing_loss import BalancedRouters
    return BalancedRouters(cast("TokenModel", model), coefficient, world_size)


def _data_ranks(model: nn.Module, context: int) -> Group:
    """Returns the data-parallel ranks; with `context` > 1 also sets the model's context-parallel group."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    assert size % context == 0, (size, context)
    if context == 1:
        return Group.of(dist.group.WORLD) if dist.is_initialized() else Group(None, 0, 1)
    with required("rl_platform.models.context", "parallel.context"):
        from rl_platform.models.context.context_parallel import ContextParallel
    shape = (size // context, context)
    data, neighbours = (group_along(axis, shape) for axis in range(len(shape)))
    cast("TokenModel", model).context = ContextParallel(neighbours)
    return Group.of(data)


def _shard(model: nn.Module, device: torch.device, dtype: torch.dtype, *, cpu_offload: bool) -> None:
    """Applies FSDP2: each decoder layer is a unit, all other parameters belong to the outermost one.

    Layers are gathered in `dtype`, which halves the traffic of bfloat16; gradients are summed in float32 and parameters
    stay float32. Layers of vision towers are gathered in float32, because LayerNorm on a CPU requires one type. The
    outermost unit is gathered in float32 for the value head.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in _layers(model):
        has_layer_norm = any(isinstance(module, nn.LayerNorm) for module in layer.modules())
        policy = MixedPrecisionPolicy() if has_layer_norm else precision
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
