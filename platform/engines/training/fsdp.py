"""Training with plain torch on one process and FSDP2 (sharded parameters, gradients and optimizer state) on several.

Every rank gets the same mini-batch and computes its own share of the rows, so denominators need no communication: each rank
knows all masks. FSDP averages gradients over ranks; local losses are multiplied by the number of ranks to make that a sum.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics, Sums
from rl_platform.config.components import Optim
from rl_platform.engines.training.base import Loss, MicroBatches
from rl_platform.records import RolloutBatch


class FSDPEngine:
    """`model`: an nn.Module from `RolloutBatch` to `ModelOutputs`. More than one rank needs an initialised process group."""

    def __init__(
        self, model: nn.Module, optim: Optim, *, dtype: torch.dtype, horizon: int, device: torch.device
    ) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device, self.horizon = device, horizon
        self.model = model.to(device)
        if self.world_size > 1:
            _shard(self.model)
        self.precision = torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else nullcontext()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.clip_grad = optim.clip_grad
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )

    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        with self.precision:
            return evaluate(self.model, batch, micro_batches, self.device)

    def step(
        self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches
    ) -> Metrics | None:
        denominators = Denominators.of(mini_batch.mask, self.horizon)
        metrics = Metrics()
        for rows in self._shares(mini_batch, micro_batches):
            part = mini_batch if len(rows) == len(mini_batch) else mini_batch.select(torch.tensor(rows))
            part = part.to(self.device)
            with self.precision:
                outputs = self.model(part, entropy=True)
            part_loss, part_metrics = loss(outputs, part, denominators)
            (part_loss * self.world_size if self.world_size > 1 else part_loss).backward()
            metrics = metrics.merge(part_metrics)
        norm = self._clipped_gradient_norm()
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        return metrics.merge(Metrics(means={("grad_norm",): Sums(norm.detach().reshape(1), 1.0)}))

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def weights(self) -> dict[str, Tensor]:
        if self.world_size == 1:
            return {name: tensor.detach() for name, tensor in self.model.state_dict(keep_vars=True).items()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))

    def state_dict(self) -> dict[str, Any]:
        if self.world_size == 1:
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        model, optimizer = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.world_size == 1:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )

    def _shares(self, batch: RolloutBatch, micro_batches: MicroBatches) -> list[list[int]]:
        """This rank's micro-batches as row indices; every rank has equally many, for their collectives to match."""
        plans = [
            micro_batches.split(batch, range(rank, len(batch), self.world_size)) for rank in range(self.world_size)
        ]
        own, longest = plans[self.rank], max(len(plan) for plan in plans)
        while len(own) < longest:  # halve the largest part until the numbers agree
            largest = max(range(len(own)), key=lambda index: len(own[index]))
            rows = own.pop(largest)
            own += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
        return own

    def _clipped_gradient_norm(self) -> Tensor:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if hasattr(norm, "full_tensor"):  # the norm of sharded gradients
            norm = norm.full_tensor()
        if self.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_grad, norm)
        return norm


@torch.no_grad()
def evaluate(model: nn.Module, batch: RolloutBatch, micro_batches: MicroBatches, device: torch.device) -> ModelOutputs:
    """The model's outputs [B,T] for a whole batch, micro-batch by micro-batch, float32 on the CPU."""
    found: dict[str, Tensor] = {}
    for rows in micro_batches.split(batch, range(len(batch))):
        outputs = model(batch.select(torch.tensor(rows)).to(device))
        for name, tensor in vars(outputs).items():
            if tensor is not None:
                found.setdefault(name, torch.zeros(batch.action_mask.shape))[rows] = tensor.float().cpu()
    return ModelOutputs(**found)


def _shard(model: nn.Module) -> None:
    """FSDP2: every decoder layer is a unit of its own, the rest is the outermost one."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer)
    fully_shard(model)
