"""The process groups of a layout: Megatron's, and those of ranks that split the tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rl_platform.config.schema.models import Parallel
from rl_platform.engines.training.megatron.device import importing_megatron, prepare
from rl_platform.engines.training.megatron.weight_map import TensorSource
from rl_platform.engines.training.sharing import Group, group_along
from rl_platform.errors import PlacementError, Problem
from rl_platform.models.context.context_parallel import ContextParallel
from rl_platform.runtime.collective_limit import collective_limit

with importing_megatron():
    from megatron.core import parallel_state, tensor_parallel


@dataclass(frozen=True)
class ProcessGroups:
    """A rank's process groups. `expert`: ranks with different experts of the same layers."""

    tensor: Group
    pipeline: Group
    data: Group
    expert: Group

    @classmethod
    def of_megatron(cls) -> ProcessGroups:
        return cls(
            Group.of(parallel_state.get_tensor_model_parallel_group()),
            Group.of(parallel_state.get_pipeline_model_parallel_group()),
            Group.of(parallel_state.get_data_parallel_group()),
            Group.of(parallel_state.get_expert_model_parallel_group()),
        )

    def sharing(self, source: TensorSource) -> Group:
        """Returns the ranks that split the tensors of `source`."""
        return self.expert if source.sharing == "experts" else self.tensor


def data_and_context(parallel: Parallel, groups: ProcessGroups) -> tuple[Group, ContextParallel]:
    """Divides Megatron's data-parallel ranks: neighbours split tokens, the groups of neighbours have other rows."""
    shape = (parallel.pipeline, groups.data.size // parallel.context, parallel.context, parallel.tensor)
    data, context = 1, 2  # axes
    return Group.of(group_along(data, shape)), ContextParallel(group_along(context, shape))


def start_groups(parallel: Parallel, device: torch.device) -> None:
    """Initialises the process groups of the layout, once per process. Raises PlacementError, see `MegatronEngine`."""
    backend = prepare(device)
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    wanted = parallel.ranks
    if dist.get_world_size() % wanted:
        message = f"{dist.get_world_size()} ranks cannot hold copies of a model that {wanted} ranks share"
        raise PlacementError([Problem("cluster.component_placement", message, allowed=f"a multiple of {wanted} ranks")])
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if sizes != (parallel.tensor, parallel.pipeline, parallel.expert):
            message = "another model of this process has tensor {}, pipeline {} and expert {}".format(*sizes)
            hint = "give them the same layout, or processes of their own: separate keys in cluster.component_placement"
            raise PlacementError([Problem("parallel", message, value=str(parallel), hint=hint)])
        return
    parallel_state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=collective_limit() / timedelta(minutes=1),
    )
    with torch.random.fork_rng(devices=[]):  # without dropout nothing is drawn, but Megatron requires a seed
        tensor_parallel.model_parallel_cuda_manual_seed(1)
