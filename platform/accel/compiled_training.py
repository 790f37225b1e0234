"""Training of a small embodied policy on one CPU, with an optimizer step that is compiled and allocates nothing.

Everything but `step` is `FSDPEngine`'s. Parameters and each of Adam's moments are views of one buffer. The compiled
functions are in accel/compiled_ppo.py. Other losses and split mini-batches use `FSDPEngine.step`, with equal results up
to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from rl_platform.accel import compiled_ppo as ppo
from rl_platform.accel.compiled_policy import is_plain
from rl_platform.algorithms.losses import actor_critic_loss
from rl_platform.algorithms.metrics import Metrics, Names, Sums
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.models import Optim
from rl_platform.engines.training.base import EngineOptions, Loss, MicroBatches
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.sharded_state import MOMENTS, adam_state
from rl_platform.models.forward import EmbodiedActorCritic
from rl_platform.records import RolloutBatch

LARGEST = 2**17  # parameters: with more of them products take the time, and nothing is gained
ALONE = 2**23  # parameters times rows up to which one thread is faster than several


def compiles(model: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether there is a compiled step for the model: an MLP policy with tanh, Gaussian with free deviations or
    categorical."""
    policy = model.model if type(model) is EmbodiedActorCritic else None
    return (
        policy is not None
        and device.type == "cpu"
        and dtype == torch.float32
        and is_plain(policy)
        and sum(parameter.numel() for parameter in policy.parameters()) <= LARGEST
    )


class CompiledEngine(FSDPEngine):
    """`model`: one that `compiles`, alone in its process group or without one."""

    def __init__(self, model: nn.Module, optim: Optim, **options: Unpack[EngineOptions]) -> None:
        super().__init__(model, optim, **options)
        policy = model.model
        heads = [policy.policy_head.weight, policy.value_head.weight, policy.policy_head.bias, policy.value_head.bias]
        hidden = [layer for layer in policy.backbone if isinstance(layer, nn.Linear)]
        log_std = [policy.log_std] if policy.action_space.kind == "continuous" else []
        self._order = [*(part for layer in hidden for part in (layer.weight, layer.bias)), *heads, *log_std]
        self._flat = {name: torch.zeros(sum(p.numel() for p in self._order)) for name in ("weights", *MOMENTS)}
        self._gradient = torch.zeros_like(self._flat["weights"])
        self._steps = torch.zeros(len(self._order))  # of Adam, all equal
        views = {name: self._views(flat) for name, flat in self._flat.items()}
        for index, parameter in enumerate(self._order):
            views["weights"][index].copy_(parameter.detach())
            parameter.data = views["weights"][index]
            moments = {name: views[name][index] for name in MOMENTS}
            adam_state(self.optimizer, parameter).update(moments | {"step": self._steps[index]})
        self._layers = _layers(self._views(self._flat["weights"]), len(hidden))
        self._gradients = _layers(self._views(self._gradient), len(hidden))
        # numpy views of the same memory, made once: making them takes a tenth of a step
        flat = self._flat["weights"], self._gradient, *(self._flat[name] for name in MOMENTS)
        self._arrays, self._step_counts = [tensor.numpy() for tensor in flat], self._steps.numpy()
        self._transposed = [weight.t() for weight, _ in self._layers]
        # of weights and of gradients; none of a categorical policy
        self._log_stds = [self._views(flat)[-1].numpy() for flat in (self._flat["weights"], self._gradient) if log_std]
        self._buffers: dict[int, _Buffers] = {}

    def fastest_alone(self, rows: int) -> bool:
        """Returns whether one thread computes a mini-batch faster than several."""
        return len(self._gradient) * rows <= ALONE

    def step(self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches) -> Metrics | None:
        compiled = _compiled(loss)
        observations = mini_batch.inputs["observations"].flatten(0, 1)
        plain = mini_batch.loss_weights is None and mini_batch.value_mask is None and micro_batches == MicroBatches()
        every = _all(mini_batch.action_mask) and _all(mini_batch.sample_mask)
        if compiled is None or not (plain and every and observations.dtype == torch.float32):
            return super().step(mini_batch, loss, micro_batches)
        buffers = self._buffers.get(len(mini_batch)) or _Buffers.of(len(mini_batch), self._layers)
        self._buffers[len(mini_batch)] = buffers
        self._forward(observations, buffers)  # no tensor here requires a gradient
        entropy = self._loss(mini_batch, compiled, buffers)
        self._backward(observations, buffers)
        return self._finished(compiled.algorithm, buffers, len(mini_batch), entropy)

    def _finished(self, algorithm: Algorithm, buffers: _Buffers, rows: int, entropy: float) -> Metrics | None:
        """Updates if all is finite."""
        policy_loss = float(buffers.policy[ppo.POLICY_LOSS]) / rows
        value_loss = float(buffers.value[ppo.VALUE_LOSS]) / rows
        finite = math.isfinite(sum(buffers.sums.tolist()))
        norm = self._update() if finite else math.nan
        if not math.isfinite(norm):
            return None
        terms = {
            "actor/pg_loss": policy_loss,
            "actor/entropy": entropy,
            "actor/loss": policy_loss - algorithm.entropy_bonus * entropy,
            "critic/loss": algorithm.value_loss_scale * value_loss,
            "grad_norm": norm,
        }
        return _metrics(buffers, rows, terms, algorithm)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([parameter.numel() for parameter in self._order])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._order, strict=True)]

    def _forward(self, observations: Tensor, buffers: _Buffers) -> None:
        inputs, last = observations, len(buffers.outputs) - 1
        for number, outputs in enumerate(buffers.outputs):
            torch.addmm(self._layers[number][1], inputs, self._transposed[number], out=outputs.tensor)
            if number < last:
                ppo.tanh()(outputs.array)
            inputs = outputs.tensor

    def _loss(self, batch: RolloutBatch, loss: _CompiledLoss, buffers: _Buffers) -> float:
        """Fills the gradients of the heads and of the deviations. Returns the mean entropy."""
        heads, gradient, bonus = buffers.outputs[-1].array, buffers.gradients[-1].array, loss.algorithm.entropy_bonus
        columns = batch.log_probs, batch.advantages, batch.values, batch.returns
        old_log_probs, advantages, values, returns = (column.numpy().reshape(-1) for column in columns)
        actions = batch.inputs["actions"].numpy()
        log_probs, slopes, entropies = buffers.columns
        surrogate = log_probs, old_log_probs, advantages, loss.policy_limits, slopes, buffers.policy
        if self._log_stds:
            log_std, log_std_gradient = self._log_stds
            ppo.gaussian_log_probs()(heads, log_std, actions.reshape(len(heads), -1), gradient, log_probs)
            ppo.clipped_surrogate()(*surrogate)
            ppo.gaussian_gradient()(log_std, slopes, gradient, log_std_gradient)
            log_std_gradient -= bonus
            entropy = float(log_std.sum()) + len(log_std) * (0.5 + ppo.HALF_LOG_2_PI)
        else:
            choices = actions.reshape(-1)
            ppo.categorical_log_probs()(heads, choices, gradient, log_probs, entropies)
            ppo.clipped_surrogate()(*surrogate)
            ppo.categorical_gradient()(choices, slopes, entropies, bonus, gradient)
            entropy = float(entropies.mean())
        ppo.clipped_value()(heads, values, returns, loss.value_limits, gradient, buffers.value)
        return entropy

    def _backward(self, observations: Tensor, buffers: _Buffers) -> None:
        """Fills the gradients of weights and biases, from the heads down."""
        for number in range(len(buffers.outputs) - 1, -1, -1):
            gradient, (weight_gradient, bias_gradient) = buffers.gradients[number], self._gradients[number]
            inputs = buffers.outputs[number - 1].tensor if number else observations
            torch.mm(gradient.transposed, inputs, out=weight_gradient)
            torch.sum(gradient.tensor, 0, out=bias_gradient)
            if number:
                below = buffers.gradients[number - 1]
                torch.mm(gradient.tensor, self._layers[number][0], out=below.tensor)
                ppo.tanh_gradient()(below.array, buffers.outputs[number - 1].array)

    def _update(self) -> float:
        """Returns the gradient's norm before it was clipped; nothing is changed if it is not finite."""
        group = self.optimizer.param_groups[0]
        limit = math.inf if self.clip_grad is None else self.clip_grad
        hyperparameters = group["lr"], *group["betas"], group["eps"], group["weight_decay"], limit
        norm = float(ppo.adam()(*self._arrays, float(self._step_counts[0]) + 1.0, *map(float, hyperparameters)))
        if math.isfinite(norm):
            self._step_counts += 1.0
        return norm


Layer = tuple[Tensor, Tensor]


def _layers(views: list[Tensor], hidden: int) -> list[Layer]:
    """(weight, bias) of every hidden layer, and of both heads as one."""
    pairs = [(views[2 * number], views[2 * number + 1]) for number in range(hidden)]
    policy, value, policy_bias, value_bias = views[2 * hidden : 2 * hidden + 4]
    return [*pairs, (_joined(policy, value), _joined(policy_bias, value_bias))]


def _joined(first: Tensor, second: Tensor) -> Tensor:
    """One view of two tensors that are adjacent in memory."""
    return first.as_strided((len(first) + len(second), *first.shape[1:]), first.stride(), first.storage_offset())


class _Matrix(NamedTuple):
    """The same memory [B,W] as torch and as the loops see it."""

    tensor: Tensor
    transposed: Tensor
    array: np.ndarray

    @classmethod
    def empty(cls, rows: int, width: int) -> _Matrix:
        tensor = torch.empty(rows, width)
        return cls(tensor, tensor.t(), tensor.numpy())


@dataclass(frozen=True)
class _Buffers:
    """Intermediate results of a step of B rows: outputs of every hidden layer [B,H] and of the heads [B,A+1], and the
    gradients of their inputs to tanh. columns: log-probs, their gradient and entropies, each [B]. sums: over positions,
    those of the policy and then those of the value, see accel/compiled_ppo.py; policy, value: views of them."""

    outputs: list[_Matrix]
    gradients: list[_Matrix]
    columns: tuple[np.ndarray, ...]
    sums: np.ndarray
    policy: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, rows: int, layers: list[Layer]) -> _Buffers:
        widths = [len(bias) for _, bias in layers]
        outputs, gradients = ([_Matrix.empty(rows, width) for width in widths] for _ in range(2))
        columns = tuple(np.empty((3, rows), np.float32))
        sums = np.zeros(ppo.RATIO_MAX + ppo.VALUE_LOSS + 2)
        return cls(outputs, gradients, columns, sums, *np.split(sums, [ppo.RATIO_MAX + 1]))


class _CompiledLoss(NamedTuple):
    algorithm: Algorithm
    policy_limits: np.ndarray
    value_limits: np.ndarray


@lru_cache(maxsize=1)
def _compiled(loss: Loss) -> _CompiledLoss | None:
    """Returns a loss that is compiled; None: it is another one."""
    if not isinstance(loss, partial) or loss.func is not actor_critic_loss:
        return None
    algorithm: Algorithm = loss.keywords["algorithm"]
    if not ppo.compiles(algorithm):
        return None
    return _CompiledLoss(algorithm, ppo.policy_limits(algorithm), ppo.value_limits(algorithm))


def _all(mask: Tensor) -> bool:
    return np.count_nonzero(mask.numpy()) == mask.numel()  # a third of the time of `all`


def _metrics(buffers: _Buffers, rows: int, terms: dict[str, float], algorithm: Algorithm) -> Metrics:
    names, kept = _measured(algorithm.clip_ratio_c, algorithm.target_kl, algorithm.value_clip)
    return Metrics(
        means={
            names: Sums(buffers.sums[kept], float(rows)),
            tuple(terms): Sums(np.array(list(terms.values())), 1.0),
        },
        minima={"actor/ratio_min": float(buffers.policy[ppo.RATIO_MIN])},
        maxima={"actor/ratio_max": float(buffers.policy[ppo.RATIO_MAX])},
    )


@cache
def _measured(dual_clip: float | None, target_kl: float | None, value_clip: float | None) -> tuple[Names, np.ndarray]:
    """Returns the sums of a step that are reported, and where they are among its policy sums and value sums."""
    asked = {
        "actor/dual_clip_frac": dual_clip,
        "actor/approx_kl_k3": target_kl,
        "critic/clip_frac": value_clip,
        "critic/out_of_range_frac": value_clip,
    }
    places = [*enumerate(ppo.POLICY_SUMS), *enumerate(ppo.VALUE_SUMS, start=ppo.RATIO_MAX + 1)]
    places = [(place, name) for place, name in places if asked.get(name, 0) is not None]
    return tuple(name for _, name in places), np.array([place for place, _ in places])
