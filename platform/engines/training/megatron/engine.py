"""Trains language models with Megatron-Core: tensor, sequence, pipeline, expert, context and data parallelism.

Results equal those of the fsdp engine up to rounding. Layers, data parallelism, pipeline schedules and optimizers are
Megatron's; they run on GPUs and, through `device`, on CPUs with gloo. Packed attention, heads and the conversion of
weights are implemented here. Ranks that split the tokens of a micro-batch are data-parallel ranks to Megatron, which
sums their gradients. Not covered: embodied policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.algorithms.action_levels import denominators_of
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics, Sums
from rl_platform.config.schema.models import Optim, Parallel
from rl_platform.device_copy import on_device
from rl_platform.engines.training.base import Loss, MicroBatches, Offloadable
from rl_platform.engines.training.megatron.device import importing_megatron, quiet_megatron
from rl_platform.engines.training.megatron.mixture import Mixture
from rl_platform.engines.training.megatron.model import build_stage, clipped_gradient_norm, with_optimizer
from rl_platform.engines.training.megatron.model_state import EMBEDDING, ModelState
from rl_platform.engines.training.megatron.process_groups import ProcessGroups, data_and_context, start_groups
from rl_platform.engines.training.megatron.supported import is_latent, unfit, uses_transformer_engine
from rl_platform.engines.training.megatron.vocab_parallel import vocab_parallel_full_kl, vocab_parallel_log_probs
from rl_platform.engines.training.megatron.weight_map import TensorSource, base_name, source_of
from rl_platform.engines.training.sharded_state import ShardedState
from rl_platform.engines.training.sharing import (
    balance_metrics_of,
    over_ranks,
    part_of,
    shares,
)
from rl_platform.errors import ConfigError
from rl_platform.models.context.context_parallel import ContextParallel
from rl_platform.models.experts.balancing_loss import RouterBalance, mean_loss, membership
from rl_platform.models.experts.routers import packed_routes
from rl_platform.models.forward import TokenModel, TokenPolicy, TokenValues
from rl_platform.records import RolloutBatch

with importing_megatron():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rl_platform.engines.training.megatron.expert_layers import give_tokens_to_router
    from rl_platform.engines.training.megatron.input import PackedInput, packed_input
    from rl_platform.engines.training.megatron.parallel_adapters import add_adapters


if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class MegatronEngine:
    """Trains a copy of `model` in Megatron's layout.

    The initial weights and the type of outputs are those of `model`, which is then moved to the meta device; its config
    and names stay. Without trainable parameters the engine can evaluate but not step, and allocates neither gradient
    buffers nor an optimizer. With several ranks the default process group must hold exactly the ranks of this model.
    All models of a process must have the same layout.

    Raises ConfigError if the model does not fit the layout, PlacementError if the number of ranks does not.
    """

    def __init__(
        self,
        model: TokenModel,
        optim: Optim,
        *,
        dtype: torch.dtype,
        horizon: int,
        device: torch.device,
        parallel: Parallel,
        nominal: bool = False,
        balance: bool = True,
        gradient_checkpointing: bool = False,
        kernels: str = "auto",
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        self.router_aux_loss_coef = router_aux_loss_coef
        self.model, self.parallel, self.device, self.horizon = model, parallel, device, horizon
        self.nominal, self.balance = nominal, balance
        self.is_value_model = isinstance(model, TokenValues)
        config = model.model.config
        if problems := [*unfit(config, parallel, "critic" if self.is_value_model else "actor", kernels)]:
            raise ConfigError(problems)
        start_groups(parallel, device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        groups = ProcessGroups.of_megatron()
        self.tensor, self.pipeline, self.data = groups.tensor, groups.pipeline, groups.data
        self.context: ContextParallel | None = None
        if parallel.context > 1:
            self.data, self.context = data_and_context(parallel, groups)
        with quiet_megatron():
            self.stages = [
                build_stage(
                    model.model.backbone,
                    parallel,
                    dtype,
                    device,
                    chunk=chunk,
                    value_head=self.is_value_model,
                    gradient_checkpointing=gradient_checkpointing,
                    fused=uses_transformer_engine(kernels, on_gpu=device.type == "cuda") and not is_latent(config),
                )
                for chunk in range(parallel.virtual_pipeline)
            ]
            whole = model.state_dict()
            for stage in self.stages:
                add_adapters(stage, self._sources(stage), model)
                for layer in stage.decoder.layers if router_aux_loss_coef or self._replays else ():
                    give_tokens_to_router(layer)
            trained = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
            parameters = [pair for stage in self.stages for pair in self._parameters(stage, whole)]
            for tensor, source in parameters:
                tensor.requires_grad_(source.names[0] in trained)
            self.chunks, self.optimizer = self.stages, None
            if trained:
                # Otherwise a stage without experts would not join the sum of the norms of experts' gradients.
                experts = self.pipeline.size > 1 and Mixture.of(config) is not None
                distributed = groups.data.size > 1 or experts
                self.chunks, self.optimizer = with_optimizer(self.stages, optim, dtype, distributed=distributed)
        self.last = self.stages[-1]
        self.clip_grad = optim.clip_grad
        shapes = {name: tensor.shape for name, tensor in whole.items()}
        tied = config.tie_word_embeddings and not self.is_value_model
        self.state = ModelState(parameters, self.optimizer, shapes, groups, tied=tied)
        for part in [model.model.state_dict()] if model.model.pretrained is None else model.model.pretrained:
            self.state.start_from({f"model.{name}": tensor for name, tensor in part.items()})
        model.to("meta")

    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        shape = batch.action_mask.shape
        shapes = {"values" if self.is_value_model else "log_probs": shape}
        if batch.reference_states is not None and not self.is_value_model:
            shapes["full_kl"] = shape
        if isinstance(self.model, TokenPolicy) and self.model.squared_probs:
            shapes["squared_probs"] = shape
        if isinstance(self.model, TokenPolicy) and self.model.keep_states:
            shapes["states"] = torch.Size((*shape, self.model.hidden_size))
        whole = {name: torch.zeros(size, device=self.device) for name, size in shapes.items()}
        parts = self._parts(batch, micro_batches)

        def keep(rows: list[int], part: RolloutBatch, packed: PackedInput, hidden: Tensor, **_: object) -> None:
            outputs = vars(self._outputs(part, packed, hidden, entropy=False))
            if rows:
                (index,) = on_device([torch.tensor(rows)], self.device)
                for name in whole:
                    whole[name][index] = outputs[name].float()

        with torch.no_grad():
            self._run(parts, keep, forward_only=True)
        for tensor in whole.values():  # each row is computed on one rank and 0 on the others
            self.pipeline.sum(self.data.sum(tensor))
        return ModelOutputs(**{name: tensor.cpu() for name, tensor in whole.items()})

    def step(self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches) -> Metrics | None:
        denominators = denominators_of(mini_batch, self.horizon, nominal=self.nominal)
        metrics, total = Metrics(), torch.zeros((), device=self.device)

        def loss_of(
            rows: list[int], part: RolloutBatch, packed: PackedInput, hidden: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            nonlocal metrics, total
            outputs = self._outputs(part, packed, hidden, entropy=True)
            part_loss, part_metrics = loss(outputs, part, denominators if rows else replace(denominators, full=False))
            metrics, total = metrics.merge(part_metrics), total + part_loss.detach()
            # 0 tokens: Megatron divides gradients by their number, but the losses are normalised already
            return part_loss, torch.zeros((), dtype=torch.int, device=self.device), {}

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        balances: list[RouterBalance] = []
        sequences = int(mini_batch.sample_mask.sum())

        def prepare(part: RolloutBatch, packed: PackedInput) -> None:
            if self.router_aux_loss_coef:
                packed.balance = self._router_balance(part, packed, sequences)
                balances.append(packed.balance)

        self._run(self._parts(mini_batch, micro_batches), loss_of, prepare, forward_only=False)
        self.pipeline.sum(self.data.sum(total))
        self.optimizer.prepare_grads()
        norm = clipped_gradient_norm(self.optimizer, self.clip_grad)
        finite = bool(torch.isfinite(total + norm))  # a clipped ratio has no gradient and hides a loss that is NaN
        if finite:
            self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        if self.last.post_process and self.data.handle is not None:
            balance = balance_metrics_of(mini_batch, self.data.size, self.model.hidden_size, self.balance)
            metrics = over_ranks(metrics, self.device, self.data).merge(balance)
        metrics = self.pipeline.broadcast_object(_on_cpu(metrics), self.pipeline.size - 1)
        metrics = self.tensor.broadcast_object(metrics, 0)  # a metric may stop the update, so it must be bit-identical
        own = {"grad_norm": torch.tensor([norm])}
        if self.router_aux_loss_coef:
            own["router_aux_loss"] = self._router_loss(balances)
        return metrics.merge(Metrics(means={(name,): Sums(value, 1.0) for name, value in own.items()}))

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def weights(self) -> dict[str, Tensor]:
        return self.state.weights()

    def gathered(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Sequence[str], Tensor]]:
        return self.state.gathered(dtype)

    def sharded_state(self) -> ShardedState:
        return {} if self.optimizer is None else self.state.sharded()

    def offloadable(self) -> Offloadable:
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        if self.optimizer is None:
            return Offloadable(parameters, [], [])
        inner = [optimizer.optimizer for optimizer in self.optimizer.chained_optimizers]
        masters = [master for adam in inner for group in adam.param_groups for master in group["params"]]
        values = [value for adam in inner for state in adam.state.values() for value in state.values()]
        gradients = [parameter.main_grad for parameter in parameters if parameter.requires_grad]
        states = [*masters, *(value for value in values if isinstance(value, Tensor))]
        return Offloadable(parameters, states, gradients)

    def _sources(self, stage: GPTModel) -> Callable[[str], TensorSource]:
        """Returns a function from the names of a stage's parameters to their sources."""
        first, config = stage.decoder.layers[0].layer_number - 1, self.model.model.config
        return partial(source_of, first_layer=first, config=config, value_head=self.is_value_model)

    def _parameters(self, stage: GPTModel, whole: dict[str, Tensor]) -> Iterator[tuple[Tensor, TensorSource]]:
        """Yields the parameters and saved buffers of one of this rank's stages with their sources in `whole`."""
        source = self._sources(stage)
        corrections = (pair for pair in stage.named_buffers() if pair[0].endswith(".router.correction"))
        for name, tensor in (*stage.named_parameters(), *corrections):
            origin = source(name)
            yield tensor, replace(origin, names=tuple(n if n in whole else base_name(n) for n in origin.names))

    def _parts(self, batch: RolloutBatch, micro_batches: MicroBatches) -> list[tuple[list[int], RolloutBatch]]:
        """Returns this data-parallel rank's micro-batches, which its tensor and pipeline ranks share."""
        parts = shares(batch, micro_batches, self.data.rank, self.data.size, self.model.hidden_size, self.balance)
        if len(self.stages) > 1:  # the interleaved schedule needs a multiple of the number of pipeline ranks
            parts += [[] for _ in range(-len(parts) % self.pipeline.size)]
        return [([*rows], part_of(batch, rows).to(self.device)) for rows in parts]

    def _run(
        self,
        parts: list[tuple[list[int], RolloutBatch]],
        finish: Callable[..., object],
        prepare: Callable[[RolloutBatch, PackedInput], None] | None = None,
        *,
        forward_only: bool,
    ) -> None:
        """Runs Megatron's schedule over the micro-batches and `finish` on the last stage's hidden states of each.

        `prepare` may change the packed tokens of a micro-batch before its forward.
        """
        share = self.tensor.size if self.parallel.sequence else 1

        def forward(
            parts: Iterator[tuple[list[int], RolloutBatch]], chunk: Callable[..., Tensor]
        ) -> tuple[Tensor, Callable[..., object]]:
            rows, part = next(parts)
            packed = packed_input(part, share, self.context)
            if self._replays and "routes" in part.inputs:
                packed.routes = self._routes(part, packed)
            if prepare is not None:
                prepare(part, packed)
            hidden = chunk(packed.tokens[None], packed.positions[None], None, packed_seq_params=packed)
            return hidden, partial(finish, rows, part, packed)

        interleaved = len(self.stages) if len(self.stages) > 1 else None
        get_forward_backward_func(self.pipeline.size, interleaved)(
            forward_step_func=forward,
            data_iterator=[iter(parts) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(parts),
            seq_length=1,  # the stages exchange the shapes
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @property
    def _replays(self) -> bool:
        return isinstance(self.model, TokenPolicy) and self.model.replay is not None

    def _routes(self, part: RolloutBatch, packed: PackedInput) -> Tensor:
        """Returns the routes [n,L,K] of the tokens that this rank's routers process."""
        assert packed.flat_index is not None
        assert packed.tokens is not None
        index, lengths = packed.flat_index, part.inputs["lengths"]
        routes = packed_routes(part.inputs["routes"], index, lengths, len(packed.tokens))
        return routes.chunk(self.tensor.size)[self.tensor.rank] if self.parallel.sequence else routes

    def _router_balance(self, part: RolloutBatch, packed: PackedInput, sequences: int) -> RouterBalance:
        """Returns the load-balancing loss of a part of a mini-batch with this number of valid sequences."""
        lengths = part.inputs["lengths"]
        assert packed.flat_index is not None
        assert packed.tokens is not None
        members = membership(packed.flat_index, lengths, len(packed.tokens))
        if self.parallel.sequence:
            members = members.chunk(self.tensor.size, dim=1)[self.tensor.rank]

        def total(counts: Tensor) -> Tensor:
            if self.parallel.sequence:
                self.tensor.sum(counts)
            if self.context is not None:
                dist.all_reduce(counts, group=self.context.group)
            return counts

        factors = part.sample_mask.float() * (self.router_aux_loss_coef / max(sequences, 1))
        return RouterBalance(factors, members, lengths.float(), total)

    def _router_loss(self, balances: list[RouterBalance]) -> Tensor:
        """Returns the load-balancing loss without its coefficient, the mean over layers [1], on every rank."""
        mixture = Mixture.of(self.model.model.config)
        assert mixture is not None
        zero = torch.zeros((), device=self.device)
        total = mean_loss(balances, self.router_aux_loss_coef, sum(mixture.layers), zero)
        dist.all_reduce(total)  # each rank has its layers and tokens
        return total.reshape(1).cpu()

    def _outputs(self, part: RolloutBatch, packed: PackedInput, hidden: Tensor, *, entropy: bool) -> ModelOutputs:
        """Outputs [B,T], 0 outside action positions, of the last hidden states [N,1,H] or a tensor rank's share.

        Every tensor and context rank gets all outputs.
        """
        rows, columns = packed.rows, packed.columns
        assert packed.flat_index is not None
        before = packed.flat_index[rows, columns - 1]
        hidden = self._gathered(hidden)[:, 0]
        states = hidden.index_select(0, before)

        def scattered(values: Tensor) -> Tensor:
            shape = (*part.action_mask.shape, *values.shape[1:])
            out = torch.zeros(shape, dtype=values.dtype, device=values.device).index_put((rows, columns), values)
            return out if self.context is None else self.context.whole(out)

        if isinstance(self.model, TokenValues):
            return ModelOutputs(values=scattered(self.last.output_layer(states.float()).squeeze(-1)))
        wanted = self.model.statistic(entropy=entropy)
        targets = part.inputs["tokens"][rows, columns]
        weight = self.last.shared_embedding_or_output_weight() if self.state.tied else self.last.output_layer.weight
        first = self.tensor.rank * len(weight)
        own = weight[: max(self.state.shapes[EMBEDDING][0] - first, 0)]  # without padding rows
        log_probs, statistic = vocab_parallel_log_probs(
            states, own, targets, first, self.model.temperature, wanted, self.tensor.handle
        )
        full_kl = None
        if part.reference_states is not None:
            head, reference_states = self.model.reference_head, part.reference_states[rows, columns]
            head = own.detach() if head is None else head[first : first + len(own)]
            full_kl = vocab_parallel_full_kl(
                states, own, reference_states, head, self.model.temperature, self.tensor.handle
            )
        return ModelOutputs(
            scattered(log_probs),
            full_kl=None if full_kl is None else scattered(full_kl),
            states=scattered(states) if self.model.keep_states else None,
            **({} if statistic is None else {wanted.removesuffix("_gradient"): scattered(statistic)}),
        )

    def _gathered(self, hidden: Tensor) -> Tensor:
        """Gathers hidden states of all tokens on every tensor rank.

        The gradient of a policy is summed over the ranks, as each has a part of the vocabulary; that of a value model
        is equal on all ranks.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        if self.parallel.sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not self.is_value_model, group=group
            )
        return hidden if self.is_value_model else tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group)


def _on_cpu(metrics: Metrics) -> Metrics:
    """Returns the metrics on the CPU: a pickled CUDA tensor is restored on the receiver's device of that index."""
    return Metrics(
        {names: Sums(sums.total.cpu(), float(sums.count)) for names, sums in metrics.means.items()},
        {name: value.cpu() for name, value in metrics.minima.items()},
        {name: value.cpu() for name, value in metrics.maxima.items()},
    )
