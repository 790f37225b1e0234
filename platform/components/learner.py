"""The common parts of actor, critic and reference: a model in a training engine, trained in epochs of mini-batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.schedule import MiniBatches, ShuffleBuffers
from rl_platform.checkpoint.verify import Written
from rl_platform.config.rollout_backend import may_go_by_group
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import COVARIANCE
from rl_platform.config.schema.models import Actor, Critic
from rl_platform.engines.rollout.build import published_dtype
from rl_platform.engines.training.base import Loss, MicroBatches, learning_rate
from rl_platform.engines.training.build import training_engine
from rl_platform.engines.training.sharded_state import ShardedState, ShardedTensor, state_bytes
from rl_platform.errors import Diverged
from rl_platform.extras import find
from rl_platform.records import RolloutBatch, Weights
from rl_platform.rng import generator
from rl_platform.runtime.host import ComponentContext
from rl_platform.tracing import recorder

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3  # optimizer steps with a non-finite gradient before the run is called diverged


def device_of(context: ComponentContext, config: Config) -> torch.device:
    """Returns the first GPU of a rank, or the CPU without one or with `actor.device: cpu`."""
    on_gpu = context.accelerators and config.actor.device != "cpu"
    return torch.device("cuda", context.accelerators[0]) if on_gpu else torch.device("cpu")


class Evaluator:
    """Base of learners and reference. `section`: backend, layout and micro-batches of `model`."""

    def __init__(self, context: ComponentContext, config: Config, section: Actor | Critic, model: nn.Module) -> None:
        self.context, self.config = context, config
        self.device = device_of(context, config)
        self.engine = training_engine(
            section,
            model,
            dtype=getattr(torch, (section.model or config.actor.model).dtype),
            horizon=config.algorithm.loss_agg_horizon or config.data.max_response_length,
            device=self.device,
            nominal=config.algorithm.loss_agg_denominator == "nominal",
        )
        micro_batch_rows = section.micro_batch_size and section.micro_batch_size // config.sequence_length
        self.training_micro_batches = MicroBatches(micro_batch_rows, section.max_tokens_per_micro_batch)
        forward_rows = config.algorithm.logprob_forward_micro_batch_size
        self.forward_micro_batches = MicroBatches(forward_rows) if forward_rows else self.training_micro_batches

    def outputs(self, batch: RolloutBatch) -> ModelOutputs:
        """Returns the outputs [B,T] of the present model, without gradient."""
        began = time.monotonic()
        outputs = self.engine.evaluate(batch, self.forward_micro_batches)
        recorder.add("work", "inference", began)
        return outputs

    def offload(self, weights: bool) -> None:
        """Moves gradients and optimizer state off the device until they are used, and the weights too if `weights`.
        Only for a section with `offload: true`."""
        from rl_platform.engines.offloading.offload import OffloadingEngine

        assert isinstance(self.engine, OffloadingEngine)
        self.engine.offload(weights=weights)


class Learner(Evaluator):
    """`kind` ("actor" or "critic") prefixes metrics and seeds the shuffle; `epochs` passes over each rollout batch."""

    def __init__(
        self,
        context: ComponentContext,
        config: Config,
        section: Actor | Critic,
        model: nn.Module,
        loss: Loss,
        kind: str,
        epochs: int,
    ) -> None:
        super().__init__(context, config, section, model)
        self.section, self.loss, self.kind, self.epochs = section, loss, kind, epochs
        self.mini_batch_rows = config.mini_batch_size(kind) // config.sequence_length
        self.target_kl = config.algorithm.target_kl if kind == "actor" else None
        self.failures = 0
        self.latest: list[Metrics] = []  # of the optimizer steps of the latest update, empty of those without effect
        self.buffers = ShuffleBuffers()
        self._buffers = {name for name, _ in model.named_buffers()}

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Trains all epochs of PPO step `step` (from 0) on the batch; metrics are means over its optimizer steps."""
        rate = learning_rate(self.section.optim, step, self.config.runner.max_steps)
        self.engine.set_learning_rate(rate)
        metrics_by_step: list[Metrics] = []
        self.latest = []
        done, skipped, stopped = 0, 0, False
        total = self.epochs * (len(batch) // self.mini_batch_rows)
        some_masked = not bool(batch.mask.all())
        trains_values = self.kind == "critic" or batch.value_mask is not None
        for epoch, mini_batch in self._mini_batches(batch, step):
            self.context.progress.update(done, total, "mini-batches")
            done += 1
            if some_masked and not bool((mini_batch.value_positions if trains_values else mini_batch.mask).any()):
                continue
            if self.kind == "actor" and self.config.algorithm.policy_loss in COVARIANCE:
                from rl_platform.algorithms.variants.covariance import covariant_positions

                draw = generator(self.context.seed, "covariance", step, done)
                mini_batch = replace(mini_batch, covariant=covariant_positions(mini_batch, self.config.algorithm, draw))
            began = time.monotonic()
            step_metrics = self.engine.step(mini_batch, self.loss, self.training_micro_batches)
            recorder.add("work", "optimizer step", began)
            self.latest.append(step_metrics or Metrics())
            if step_metrics is None:
                skipped += 1
                try:
                    self._count_failure(mini_batch, step, epoch)
                except Diverged:
                    self.failures = max(0, self.failures - skipped)  # the state is that before the update, for a replay
                    raise
                continue
            self.failures = 0
            metrics_by_step.append(step_metrics)
            if self.target_kl is not None and (step_metrics.mean("actor/approx_kl_k3") or 0.0) > self.target_kl:
                stopped = True  # on every rank: the metrics are those of all ranks together
                break
        metrics = Metrics.together(metrics_by_step).finalize()
        named = {name if "/" in name else f"{self.kind}/{name}": value for name, value in metrics.items()}
        if metrics_by_step:
            named |= _ends("first", metrics_by_step[0]) | _ends("last", metrics_by_step[-1])
        named |= {f"{self.kind}/lr": rate, f"{self.kind}/skipped_updates": float(skipped)}
        if self.target_kl is not None:
            named |= {
                "actor/early_stopped": float(stopped and done < total),
                "actor/optimizer_steps": float(len(metrics_by_step)),
            }
        return named

    def latest_steps(self) -> list[dict[str, float]]:
        """Returns the metrics of each optimizer step of the latest update; none of a step with a gradient that was not
        finite."""
        return [metrics.finalize() for metrics in self.latest]

    def close(self) -> None:
        self.buffers.thread.shutdown()

    def _mini_batches(self, batch: RolloutBatch, step: int) -> Iterator[tuple[int, RolloutBatch]]:
        """Yields the mini-batches of all epochs, each with the number of its epoch."""
        shuffled = self.config.algorithm.shuffle_mini_batches

        def order(epoch: int) -> torch.Generator | None:
            return generator(self.context.seed, self.kind, step, epoch) if shuffled else None

        for epoch, parts in enumerate(
            MiniBatches(batch, self.mini_batch_rows, self.buffers).epochs(self.epochs, order)
        ):
            for mini_batch in parts:
                yield epoch, mini_batch

    def _count_failure(self, mini_batch: RolloutBatch, step: int, epoch: int) -> None:
        self.failures += 1
        kept = ""
        keep: Callable[..., Path | None] = find(
            "rl_platform.runners.watching", "failed_batches.keep_failed_batch", lambda *_: None
        )
        if self.context.rank == 0 and (path := keep(mini_batch, self.config, self.kind, step, epoch)):
            kept = f" The last such mini-batch is in {path}."
        if self.failures >= FAILURES_IN_A_ROW:
            raise Diverged(
                f"{self.context.label}: {self.failures} optimizer steps in a row had a non-finite gradient "
                f"(PPO step {step}, epoch {epoch}). No parameter was changed by them. "
                f"Lower {self.kind}.optim.lr or resume from an earlier checkpoint.{kept}"
            )

    def save_state(self, folder: str) -> dict[str, Written]:
        """Writes this rank's part of the state into `folder`; returns its files. Raises CheckpointError."""
        from rl_platform.engines.training.state_files import write  # takes a second to import

        with self._onloaded():
            return write(self._state(torch.tensor(self.failures)), folder)

    def load_state(self, folder: str) -> None:
        """Loads a state, which any number of ranks and any backend may have saved. Raises CheckpointError."""
        from rl_platform.engines.training.state_files import read

        failures = torch.tensor(0)
        with self._onloaded():
            read(self._state(failures), folder)
        self.failures = int(failures)

    def state_bytes(self) -> int:
        """Returns the approximate size of this rank's part of the state on disk, in bytes."""
        with self._onloaded():
            return state_bytes(self.engine.sharded_state())

    def _onloaded(self) -> AbstractContextManager[None]:
        """Moves all of the engine's state to the device within the block."""
        if self.section.offload is not True:
            return nullcontext()
        from rl_platform.engines.offloading.offload import onloaded

        return onloaded(self.engine)

    def _state(self, failures: Tensor) -> ShardedState:
        return self.engine.sharded_state() | {"failures": ShardedTensor.of(failures)}

    def publish(self, version: int, copy: bool = False, on_request: bool = False) -> Weights:
        """Returns the parameters under the model's own names, with adapters merged into new matrices.

        Within one process they are references, unless `copy`: a copy does not change during training. version: number
        of updates so far. on_request: the ranks gather when weights are requested; no call of the learner may run at
        that time.
        """
        delta, readable = self.config.rollout.sync == "delta", self.config.readable_publications
        offered = readable == 1 and may_go_by_group(self.config, self.device.type == "cuda")
        dtype = published_dtype(self.config, self.device)
        if self.context.world_size > 1:
            return Weights(
                version,
                {},
                delta,
                offered,
                gathered=partial(self._gathered, dtype),
                stores=self.context.rank == 0,
                readable=readable,
                overwrites=not copy,
                on_request=on_request and not copy,
            )
        weights = {name.removeprefix("model."): tensor for name, tensor in self.engine.weights().items()}
        if self.section.lora is not None:
            from rl_platform.models.adapters.lora import merged

            weights = merged(weights, self.section.lora)
        state = {name: tensor.clone() for name, tensor in weights.items()} if copy else weights
        types = {
            name: dtype for name, tensor in state.items() if tensor.dtype != dtype and self._converts(name, tensor)
        }
        return Weights(version, state, delta, offered, types=types, readable=readable)

    def whole_weights(self) -> dict[str, Tensor]:
        """Returns the weights in float32 on rank 0, on the CPU, and nothing on other ranks. Called on all ranks."""
        if self.context.world_size == 1:
            return {name: tensor.cpu() for name, tensor in self.publish(0).state.items()}
        whole: dict[str, Tensor] = {}
        for names, tensor in self._gathered(torch.float32):
            if self.context.rank == 0:
                whole |= dict.fromkeys(names, tensor.cpu())
        return whole

    def _gathered(self, dtype: torch.dtype) -> Iterator[tuple[Sequence[str], Tensor]]:
        sent = torch.float32 if self.section.lora else dtype  # adapters are merged in float32
        parts: Iterable[tuple[Sequence[str], Tensor]] = (
            ([name.removeprefix("model.") for name in names], tensor) for names, tensor in self.engine.gathered(sent)
        )
        if self.section.lora is not None:
            from rl_platform.models.adapters.lora import merged_parts

            parts = merged_parts(parts, self.section.lora)
        for names, tensor in parts:
            yield names, tensor.to(dtype) if self._converts(names[0], tensor) else tensor

    def _converts(self, name: str, tensor: Tensor) -> bool:
        """Returns whether the engine stores a tensor in its own type. Buffers are float32 in every model."""
        return tensor.is_floating_point() and f"model.{name}" not in self._buffers


def _ends(which: str, metrics: Metrics) -> dict[str, float]:
    """Returns the distance of the policy to the rollout's, in the first or the last optimizer step of an update."""
    means = {name: metrics.mean(name) for name in ("actor/approx_kl", "actor/clip_frac")}
    return {f"{name}_{which}": value for name, value in means.items() if value is not None}


def present(tensor: Tensor | None) -> Tensor:
    """Returns an output that this kind of model always has."""
    assert tensor is not None
    return tensor
