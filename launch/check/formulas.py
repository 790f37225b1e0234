"""The losses beside formulas written down a second time, and beside numeric gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_platform.algorithms.kl import full_kl, kl_estimate, kl_loss_estimate
from rl_platform.algorithms.losses import ModelOutputs, value_loss
from rl_platform.algorithms.policy_losses import policy_loss_function
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import POLICY_LOSSES, Algorithm
from rl_platform.launch.check.property import Difference, Property, compare
from rl_platform.launch.check.samples import Case, LossFunction, loss_and_gradients
from rl_platform.records import RolloutBatch

UNBOUNDED = 1e8  # a clip range that no ratio and no value of a case reaches
STEP = 1e-6  # of the numeric gradient, in float64
NUMERIC = 1e-4  # its own error


def first_gradient(case: Case) -> Iterator[Difference]:
    """At rho = 1 the loss falls along A grad log pi."""
    batch = case.batch
    _, gradient = _policy_loss(case, _old(batch), case.algorithm)
    expected = -torch.where(batch.mask, _advantages(batch), 0.0)
    if case.algorithm.policy_loss == "gspo":  # every position moves the one ratio of its row
        lengths = batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
        expected = torch.where(batch.mask, expected.sum(dim=1, keepdim=True) / lengths, 0.0)
    yield compare("gradient of the policy loss, and -A", gradient, expected)


def clipping(case: Case) -> Iterator[Difference]:
    moved = case.outputs.log_probs
    assert moved is not None
    loss, gradient = _policy_loss(case, moved, case.algorithm)
    variable = moved.clone().requires_grad_()
    expected = _clipped(variable, case.batch, case.algorithm)
    yield compare("policy loss", loss, expected)
    yield compare("its gradient", gradient, _gradient(expected, variable))
    unbounded = {"clip_ratio_low": 1.0, "clip_ratio_high": UNBOUNDED, "clip_ratio_c": None}
    free, _ = _policy_loss(case, moved, case.algorithm.model_copy(update=unbounded))
    weight = moved if case.algorithm.policy_loss == "cispo" else torch.ones_like(moved)
    expected = -torch.where(case.batch.mask, _advantages(case.batch) * _ratio(moved, case.batch, case) * weight, 0.0)
    yield compare("unbounded clip range, and -A rho", free, expected)
    plain, _ = _policy_loss(case, moved, case.algorithm.model_copy(update={"clip_ratio_c": None}))
    endless, _ = _policy_loss(case, moved, case.algorithm.model_copy(update={"clip_ratio_c": UNBOUNDED}))
    yield compare("unbounded dual clip, and none", endless, plain)


def value_losses(case: Case) -> Iterator[Difference]:
    algorithm, batch, values = case.algorithm, case.batch, case.outputs.values
    assert values is not None
    assert batch.values is not None
    assert batch.returns is not None
    delta, clip = algorithm.huber_delta, algorithm.value_clip
    returns, numbers = batch.returns, (values, batch.values, batch.returns, batch.value_positions)

    def phi(error: Tensor, delta: float | None) -> Tensor:
        square, size = error.square() / 2, error.abs()
        return square if delta is None else torch.where(size <= delta, square, delta * (size - delta / 2))

    expected = phi(values - returns, delta)
    if clip is not None:
        bounded = torch.minimum(torch.maximum(values, batch.values - clip), batch.values + clip)
        expected = torch.maximum(expected, phi(bounded - returns, delta))
    yield compare("value loss", value_loss(*numbers, clip, delta)[0], torch.where(batch.value_positions, expected, 0.0))
    free = value_loss(*numbers, None, delta)[0]
    yield compare("unbounded value clip, and none", value_loss(*numbers, UNBOUNDED, delta)[0], free)
    squared = value_loss(*numbers, clip, None)[0]
    yield compare("unbounded Huber delta, and none", value_loss(*numbers, clip, UNBOUNDED)[0], squared)


# k(d) and k'(d) of the estimators, d = log pi - log pi_ref
_KL = {
    "k1": (lambda d: d, torch.ones_like),
    "abs": (torch.abs, torch.sign),
    "k2": (lambda d: d.square() / 2, lambda d: d),
    "k3": (lambda d: (-d).exp() - 1 + d, lambda d: 1 - (-d).exp()),
}
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_terms(case: Case) -> Iterator[Difference]:
    """Over all tokens of a small vocabulary: the expected value, and for a loss the expected gradient in the logits."""
    algorithm, numbers = case.algorithm, case.numbers("kl")
    logits, reference = torch.randn(2, 6, generator=numbers, dtype=torch.float64)
    logits.requires_grad_()
    log_pi, log_ref = logits.log_softmax(0), reference.log_softmax(0)
    pi, d = log_pi.detach().exp(), (log_pi - log_ref).detach()
    exact = (pi * d).sum()
    uses = [("reward", algorithm.kl_penalty)] if algorithm.use_kl_in_reward else []
    uses += [("loss", algorithm.kl_loss_type)] if algorithm.use_kl_loss else []
    for where, estimator in uses:
        if estimator == "full":
            found = full_kl(logits[None], reference[None]).sum()
            yield compare("full KL, and the sum over the vocabulary", found, exact)
            gradient = torch.autograd.grad(found, logits)[0]
            yield compare("gradient of the full KL", gradient, pi * (d - exact))
            continue
        k, slope = _KL[_ALIASES.get(estimator.removesuffix("+"), estimator.removesuffix("+"))]
        value = kl_estimate(log_pi, log_ref, None, estimator)
        yield compare(f"expected {estimator} in the {where}", (pi * value.detach()).sum(), (pi * k(d)).sum())
        if where == "reward":
            continue
        mode = "k2" if estimator.endswith("+") else algorithm.kl_loss_grad
        written = algorithm.kl_loss_grad  # beside a + the default
        term = kl_loss_estimate(log_pi, log_pi.detach(), log_ref, None, estimator, written)
        gradient = torch.autograd.grad((pi * term).sum(), logits, retain_graph=True)[0]
        weight = {"path": slope(d), "k2": d, "score": k(d) + slope(d)}[mode]  # of grad log pi, for each token
        expected = pi * weight - pi * (pi * weight).sum()
        yield compare(f"expected gradient of {estimator}, {mode}", gradient, expected)


def autograd(case: Case) -> Iterator[Difference]:
    """A small step along a random direction changes a loss by its gradient."""
    outputs, batch = _double(case.outputs), _double_batch(case.batch)
    algorithm = case.algorithm
    if algorithm.use_kl_loss and (algorithm.kl_loss_type.endswith("+") or algorithm.kl_loss_grad == "k2"):
        algorithm = algorithm.model_copy(update={"use_kl_loss": False})  # its gradient is another function's
    for name, loss in case.losses.items():
        plain = _loss(loss, outputs, batch, algorithm, case)
        for key in plain:
            if key == "loss":
                continue
            output = key.removeprefix("gradient in ")
            tensor = getattr(outputs, output)
            direction = torch.randn(tensor.shape, generator=case.numbers("autograd", output), dtype=torch.float64)
            direction = torch.where(batch.mask, direction, 0.0)
            up, down = (
                _loss(loss, replace(outputs, **{output: tensor + sign * STEP * direction}), batch, algorithm, case)
                for sign in (1, -1)
            )
            slope = (up["loss"] - down["loss"]) / (2 * STEP)
            yield compare(f"slope of the {name} loss along {output}", (plain[key] * direction).sum(), slope, NUMERIC)


def _loss(
    loss: LossFunction, outputs: ModelOutputs, batch: RolloutBatch, algorithm: Algorithm, case: Case
) -> dict[str, Tensor]:
    return loss_and_gradients(loss, outputs, batch, [range(len(batch))], algorithm, case.horizon)


def _policy_loss(case: Case, log_probs: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Loss and gradient per position [B,T]."""
    variable, batch = log_probs.clone().requires_grad_(), case.batch
    function = policy_loss_function(algorithm.policy_loss)
    loss, _ = function(variable, _old(batch), _advantages(batch), batch.mask, algorithm)
    return loss.detach(), _gradient(loss, variable)


def _gradient(loss: Tensor, variable: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), variable)[0]


def _clipped(log_probs: Tensor, batch: RolloutBatch, algorithm: Algorithm) -> Tensor:
    """The published formula of a policy loss per position [B,T], differentiable in `log_probs`."""
    mask, cost = batch.mask, -torch.where(batch.mask, _advantages(batch), 0.0)
    log_ratio = torch.where(mask, log_probs - _old(batch), 0.0)
    if algorithm.policy_loss == "gspo":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1) * mask
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    if algorithm.policy_loss == "cispo":
        return cost * bounded.detach() * log_probs
    loss = torch.maximum(cost * ratio, cost * bounded)
    if algorithm.clip_ratio_c is not None:
        loss = torch.where(cost > 0, torch.minimum(loss, cost * algorithm.clip_ratio_c), loss)
    return loss


def _ratio(log_probs: Tensor, batch: RolloutBatch, case: Case) -> Tensor:
    log_ratio = torch.where(batch.mask, log_probs - _old(batch), 0.0)
    if case.algorithm.policy_loss == "gspo":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def _old(batch: RolloutBatch) -> Tensor:
    assert batch.log_probs is not None
    return batch.log_probs


def _advantages(batch: RolloutBatch) -> Tensor:
    assert batch.advantages is not None
    return batch.advantages


def _double(outputs: ModelOutputs) -> ModelOutputs:
    return ModelOutputs(**{name: tensor.double() for name, tensor in vars(outputs).items() if tensor is not None})


def _double_batch(batch: RolloutBatch) -> RolloutBatch:
    changed: dict[str, Any] = {
        name: tensor.double()
        for name, tensor in vars(batch).items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    return replace(batch, **changed)


def _at_ratio_1(config: Config) -> str | None:
    algorithm = config.algorithm
    if algorithm.policy_loss not in POLICY_LOSSES:
        return "policy_loss is a function of your own"
    if algorithm.policy_loss != "reinforce" and min(algorithm.clip_ratio_low, algorithm.clip_ratio_high) == 0:
        return "a clip range of 0 leaves no gradient on that side"
    return None


def _clipping(config: Config) -> str | None:
    kind = config.algorithm.policy_loss
    if kind not in POLICY_LOSSES:
        return "policy_loss is a function of your own"
    return "policy_loss reinforce has no ratio" if kind == "reinforce" else None


def _values(config: Config) -> str | None:
    return None if config.has_values else "there is no critic"


def _kl_asked(config: Config) -> str | None:
    return None if config.algorithm.needs_reference else "no KL term is on"


def _autograd(config: Config) -> str | None:
    kind = config.algorithm.policy_loss
    if kind == "cispo":
        return "policy_loss cispo stops the gradient of its weight on purpose"
    return None if kind in POLICY_LOSSES else "a function of your own may stop gradients on purpose"


PROPERTIES = [
    Property("first gradient", "gradient of the policy loss at ratio 1 = -A", first_gradient, _at_ratio_1),
    Property("ratio clipping", "policy loss = its formula; endless bounds = none", clipping, _clipping),
    Property("value loss", "value loss = its formula; endless bounds = none", value_losses, _values),
    Property("KL terms", "expected value, gradient = exact ones of a vocabulary", kl_terms, _kl_asked),
    Property("autograd", "gradients of the losses = numeric slopes", autograd, _autograd),
]
