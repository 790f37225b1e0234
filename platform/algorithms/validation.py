"""Checks of a rollout batch before anything is computed from it: fields that belong together, finite numbers.

Called a few times per PPO step on the whole batch: shapes, and one sum per tensor. The exact search for the first bad
element runs only where a sum is not finite. Results of a user's own estimator are checked in user_estimator.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.errors import DataError, Diverged
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

PER_POSITION = (
    "ends", "bootstrapped", "end_values", "rewards", "rollout_log_probs", "log_probs", "reference_log_probs", "full_kl",
    "values", "advantages", "returns", "loss_weights", "kl_penalties", "value_mask",
    "entropy_units", "covariant", "squared_probs", "token_versions",
)  # fmt: skip
PER_ROW = ("sample_mask", "group_ids", "correct", "versions", "compared", "baselines", "continues")
BOOLEAN = ("action_mask", "sample_mask", "ends", "bootstrapped", "correct", "compared", "value_mask", "covariant")
WITH_FEATURES = ("reference_states",)  # [B,T,...]
PER_CHOICE = ("end_observations",)  # [B,C,...]; a choice of an embodied policy may be several positions

# Tensors in the order in which they are computed, so that an error names the first bad one, and where to look for the
# reason.
_POLICY = "the actor may have diverged: lower actor.optim.lr or resume from an earlier checkpoint"
_VALUES = "the critic (embodied: the actor) may have diverged: lower its optim.lr or resume from an earlier checkpoint"
_ESTIMATOR = "their inputs are finite: check algorithm.adv_type and the magnitude of rewards and values"
SOURCES = {
    "rollout_log_probs": f"the rollout engine reports them with the actor's weights, and {_POLICY}",
    "reference_log_probs": "they come from the frozen model (reference.model)",
    "full_kl": "it compares the actor to the frozen model (reference.model)",
    "log_probs": _POLICY,
    "squared_probs": _POLICY,
    "values": _VALUES,
    "end_values": _VALUES,
    "rewards": "they come from the reward function or the environment, less a KL penalty if there is one",
    "advantages": _ESTIMATOR,
    "returns": _ESTIMATOR,
}


def check_batch(batch: RolloutBatch, tolerated: tuple[str, ...] = ()) -> None:
    """Raises DataError for fields that do not belong together, Diverged for numbers that are not finite where
    `batch.mask` is set; both name the tensor and the first bad index. Fields that are None are not there yet.

    `tolerated`: names of fields that may hold anything, because their reader handles it.
    """
    check_alignment(batch)
    mask = batch.mask
    for name in SOURCES:
        tensor: Tensor | None = getattr(batch, name)
        if tensor is not None and name not in tolerated:
            # end values count even after a step that does not: positions before it are bootstrapped from them
            check_finite(name, tensor, batch.ends if name == "end_values" and batch.ends is not None else mask)


def check_finite(name: str, tensor: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> None:
    """Raises Diverged for the first number of `tensor` [B,T] that is not finite where `mask` [B,T] is set."""
    if math.isfinite(tensor.sum().item()):  # NaN and infinity survive a sum
        return
    index = first_not_finite(tensor, mask)  # None: outside the mask, or finite numbers overflowed the sum
    if index is not None:
        source = f": {SOURCES[name]}" if name in SOURCES else ""
        raise Diverged(
            f"{name} of the rollout are not finite, first {name}{list(index)} = {tensor[index].item()}{source}"
        )


def first_not_finite(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> tuple[int, ...] | None:
    """Returns the first index of [B,T] where `mask` is set and `x` is NaN or infinite."""
    wrong = mask & ~torch.isfinite(x)
    return tuple(wrong.nonzero()[0].tolist()) if bool(wrong.any()) else None


def check_alignment(batch: RolloutBatch) -> None:
    """Raises DataError for a field whose shape or type does not fit `action_mask` [B,T] bool.

    Raises it also for actions of a token sequence that lie beyond its length or have no token before them.
    """
    shape = list(batch.action_mask.shape)
    if len(shape) != 2:
        raise DataError(f"action_mask of the rollout has shape {shape}: it has two dimensions, rows and positions")
    for name, tensor, shared, more in _fields(batch):
        given, expected = list(tensor.shape), shape[:shared]
        if given[:shared] != expected or (len(given) > shared and not more):
            raise DataError(_misaligned(name, given, expected, more))
    for name in BOOLEAN:
        tensor = getattr(batch, name)
        if tensor is not None and tensor.dtype != torch.bool:
            raise DataError(f"{name} of the rollout is of type {tensor.dtype}, but masks are torch.bool")
    if "tokens" in batch.inputs and "lengths" in batch.inputs:
        _check_sequences(batch)


def _fields(batch: RolloutBatch) -> Iterator[tuple[str, Tensor, int, bool]]:
    """Yields (name, tensor, how many of its dimensions are those of action_mask, whether it may have more)."""
    for names, shared, more in (
        (PER_POSITION, 2, False),
        (PER_ROW, 1, False),
        (WITH_FEATURES, 2, True),
        (PER_CHOICE, 1, True),
    ):
        for name in names:
            tensor = getattr(batch, name)
            if tensor is not None:
                yield name, tensor, shared, more
    for name, tensor in batch.inputs.items():
        tokens = name == "tokens"
        yield f"inputs[{name!r}]", tensor, 2 if tokens else 1, not tokens


def _misaligned(name: str, given: list[int], expected: list[int], more: bool) -> str:
    wanted = f"[{', '.join([*map(str, expected), *(['...'] if more else [])])}]"
    rows = ""
    if given and given[0] != expected[0]:
        rows = f"; row {min(given[0], expected[0])} is the first without a counterpart"
    return (
        f"{name} of the rollout is misaligned: its shape is {given}, but action_mask asks for {wanted}{rows}. "
        "The component that made it is wrong"
    )


def _check_sequences(batch: RolloutBatch) -> None:
    width, lengths = batch.action_mask.shape[1], batch.inputs["lengths"]
    positions = torch.arange(width, device=lengths.device)
    last = torch.where(batch.action_mask, positions, -1).amax(dim=1)
    beyond = (lengths > width) | (lengths <= last)
    if bool(beyond.any()):
        row = int(beyond.nonzero()[0])
        where = f"its last action is at position {int(last[row])} of {width}"
        raise DataError(
            f"inputs['lengths'] of the rollout do not fit the actions, first lengths[{row}] = {int(lengths[row])}: "
            f"{where}. A length counts prompt and response, and padding follows them"
        )
    first = batch.action_mask[:, 0]
    if bool(first.any()):
        raise DataError(
            f"action_mask of the rollout, first action_mask[{int(first.nonzero()[0])}, 0]: the first token of a "
            "sequence cannot be an action, as nothing stands before it to predict it from. A prompt is empty"
        )
