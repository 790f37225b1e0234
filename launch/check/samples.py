"""The input of the properties: one small random rollout in the shape of the config's task, and its losses.

All numbers follow from `runner.seed`. Random numbers replace the outputs of models and environments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels, denominators_of
from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs, actor_critic_loss, actor_loss, critic_loss
from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.rewards import penalized, place_outcome_rewards
from rl_platform.algorithms.variants.covariance import covariant_positions
from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.components.actor import action_levels
from rl_platform.components.policy_recordings.chunks import ChunkRecording
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import COVARIANCE, Algorithm, estimator_needs
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.records import RolloutBatch
from rl_platform.rng import generator

ROWS, LONGEST_PROMPT, LONGEST_RESPONSE = 12, 5, 11
ENVIRONMENTS, CHOICES = 4, 12
SPACES = EnvSpaces((3,), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0))
LARGEST_GROUP = 4
MOVED = 0.3  # deviation of log-probs and values from the old ones: some ratios are clipped, some are not

LossFunction = Callable[[ModelOutputs, RolloutBatch, Denominators, Algorithm], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class CheckedConfig:
    """A valid config, and the rollout, outputs and losses that it is tried on."""

    config: Config

    @property
    def algorithm(self) -> Algorithm:
        return self.config.algorithm

    @property
    def embodied(self) -> bool:
        return self.config.runner.task_type == "embodied"

    @property
    def horizon(self) -> float:
        return self.algorithm.loss_agg_horizon or self.config.data.max_response_length

    @cached_property
    def rollout(self) -> RolloutBatch:
        """[B,T] the rollout before the estimator. A row per environment if embodied, else per response."""
        return _random_steps(self) if self.embodied else _random_responses(self)

    @cached_property
    def batch(self) -> RolloutBatch:
        """The rollout with advantages and returns, of which mini-batches are made. A row per transition if embodied."""
        batch = estimated(self.rollout, self.algorithm)
        if self.algorithm.policy_loss in COVARIANCE:
            batch = replace(batch, covariant=covariant_positions(batch, self.algorithm, self.numbers("covariance")))
        return batch

    @cached_property
    def outputs(self) -> ModelOutputs:
        """Outputs for `batch` of a model that was updated since the rollout."""
        return _moved_outputs(self.batch, self.numbers("outputs"))

    @property
    def rows(self) -> int:
        """Rows of `batch`."""
        return ENVIRONMENTS * CHOICES if self.embodied else len(self.rollout)

    @property
    def losses(self) -> dict[str, LossFunction]:
        """The losses that the config trains with, by name."""
        if self.algorithm.loss_type == "actor_critic":
            return {"actor and critic": actor_critic_loss}
        losses: dict[str, LossFunction] = {"actor": actor_loss}
        if self.config.has_values:
            losses["critic"] = critic_loss
        return losses

    def numbers(self, *names: str) -> torch.Generator:
        return generator(self.config.runner.seed, "check", *names)

    def loss_and_gradients(
        self, loss: LossFunction, outputs: ModelOutputs, batch: RolloutBatch, parts: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Returns `loss` and its gradients [B,T] in the outputs, of one mini-batch computed in parts of its rows.

        For a part without rows, as on a rank without work, a masked row is computed.
        """
        leaves = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in vars(outputs).items()
            if tensor is not None
        }
        denominators = denominators_of(batch, self.horizon, nominal=self.algorithm.loss_agg_denominator == "nominal")
        total = torch.zeros(())
        for rows in parts:
            index = torch.tensor(rows or [0])
            part, divisors = batch.select(index), denominators
            if not rows:
                part, divisors = replace(part, sample_mask=torch.tensor([False])), replace(denominators, full=False)
            share, _ = loss(
                ModelOutputs(**{name: leaf[index] for name, leaf in leaves.items()}), part, divisors, self.algorithm
            )
            share.backward()
            total = total + share.detach()
        gradients = {f"gradient in {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return {"loss": total, **gradients}


def _random_responses(case: CheckedConfig) -> RolloutBatch:
    """Returns rows of a prompt, a response with observations inside it, and padding; the last row does not count."""
    numbers, size = case.numbers("responses"), min(case.algorithm.group_size, LARGEST_GROUP)
    groups = -(-ROWS // size)
    rows, width = groups * size, LONGEST_PROMPT + LONGEST_RESPONSE
    prompts = 2 + torch.randint(LONGEST_PROMPT - 1, (groups,), generator=numbers).repeat_interleave(size)
    lengths = prompts + 1 + torch.randint(LONGEST_RESPONSE, (rows,), generator=numbers)
    columns = torch.arange(width)
    observed = torch.rand(rows, width, generator=numbers) < 0.2
    observed[torch.arange(rows), prompts] = False  # every response begins with a token of the policy's
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None]) & ~observed
    counts = torch.ones(rows, dtype=torch.bool)
    counts[-1] = False
    right = torch.rand(rows, generator=numbers) < 0.5
    scores = right + 0.3 * torch.rand(rows, generator=numbers)
    batch = RolloutBatch(
        inputs={"tokens": torch.randint(256, (rows, width), generator=numbers), "lengths": lengths},
        action_mask=mask,
        sample_mask=counts,
        group_ids=torch.arange(groups).repeat_interleave(size),
        rewards=place_outcome_rewards(scores, mask),
        rollout_log_probs=torch.zeros(rows, width),
        correct=right,
    )
    return _with_models(batch, case.config, numbers)


def _random_steps(case: CheckedConfig) -> RolloutBatch:
    """Returns rows of choices in environments, with ends of episodes, some of them truncated with a value."""
    config, numbers, shape = case.config, case.numbers("steps"), (ENVIRONMENTS, CHOICES)
    levels = action_levels(config, SPACES)
    recording = ChunkRecording(ENVIRONMENTS, CHOICES * levels.num_actions, SPACES, levels)
    actions = np.zeros((*recording.rewards.shape, *SPACES.policy_action_shape), SPACES.policy_action_dtype)
    recording.actions = actions  # else it would be made of the first actions of a policy
    for array in (recording.observations, recording.end_observations, actions, recording.log_probs):
        array[:] = torch.randn(array.shape, generator=numbers).numpy()
    ends = torch.rand(shape, generator=numbers) < 0.2
    if config.whole_episodes:  # a row is idle after its first end
        ends &= ends.cumsum(dim=1) == 1
        resting = ends.cumsum(dim=1) - ends.int() > 0
    else:
        resting = torch.zeros_like(ends)
    left = torch.where(ends, torch.randint(levels.num_actions, shape, generator=numbers), levels.num_actions - 1)
    # actions of a chunk after an end are not executed
    executed = (torch.arange(levels.num_actions) <= left[..., None]) & ~resting[..., None]
    rewards = torch.randn(executed.shape, generator=numbers)
    recording.executed[:], recording.rewards[:] = executed.numpy(), torch.where(executed, rewards, 0.0).numpy()
    recording.ends[:] = ends.numpy()
    recording.terminated[:] = (ends & (torch.rand(shape, generator=numbers) < 0.5)).numpy()
    next_observations = torch.randn(ENVIRONMENTS, *SPACES.observation_shape, generator=numbers)
    batch = recording.finish(next_observations.numpy(), config.algorithm.bootstrap_type)
    if config.whole_episodes:
        groups = ENVIRONMENTS // min(config.algorithm.group_size, LARGEST_GROUP)
        batch = replace(batch, group_ids=batch.group_ids % groups, bootstrapped=None, end_observations=None)
        return _with_models(_as_recorded(batch, levels), config, numbers)
    assert batch.bootstrapped is not None
    following = torch.randn(batch.bootstrapped.shape, generator=numbers)
    batch = replace(batch, end_values=torch.where(batch.bootstrapped, following, 0.0))
    return _with_models(_as_recorded(batch, levels), config, numbers)


def _as_recorded(batch: RolloutBatch, levels: ActionLevels) -> RolloutBatch:
    """Returns the batch in the shape of `Recording` where there is one action per choice."""
    if levels.single:
        batch.inputs["actions"] = batch.inputs["actions"][:, :, 0]
        del batch.inputs["executed"]
    return batch


def _with_models(batch: RolloutBatch, config: Config, numbers: torch.Generator) -> RolloutBatch:
    """Returns the batch with random numbers for the outputs of its models."""
    shape, algorithm = batch.action_mask.shape, config.algorithm
    log_probs = -torch.rand(shape, generator=numbers) - 0.1

    values = torch.randn(shape, generator=numbers)
    if batch.value_mask is not None:
        values = torch.where(batch.value_mask, values, 0.0)

    def noisy() -> Tensor:
        return log_probs + MOVED * torch.randn(shape, generator=numbers)

    needs, probs = estimator_needs(algorithm.adv_type), log_probs.exp()
    other = torch.rand(shape, generator=numbers) * (1.0 - probs).square()  # of the tokens that were not sampled
    return replace(
        batch,
        log_probs=log_probs,
        rollout_log_probs=noisy(),
        values=values if config.has_values else None,
        reference_log_probs=noisy() if algorithm.needs_reference else None,
        baselines=torch.rand(shape[:1], generator=numbers) if needs.greedy else None,
        squared_probs=probs.square() + other if needs.squared_probs else None,
        full_kl=torch.rand(shape, generator=numbers) if algorithm.full_kl_in_reward else None,
    )


def estimated(batch: RolloutBatch, algorithm: Algorithm) -> RolloutBatch:
    """Applies KL penalty, mismatch weights and estimator, as a step of a run does; without PF-PPO."""
    if algorithm.old_log_probs == "rollout":
        batch = replace(batch, log_probs=batch.rollout_log_probs)
    if algorithm.use_kl_in_reward:
        batch, _ = penalized(batch, algorithm, algorithm.kl_ctrl.kl_coef)
    if algorithm.rollout_is is not None:
        assert batch.log_probs is not None
        weights, _ = mismatch_weights(batch.log_probs, batch.rollout_log_probs, batch.mask, algorithm.rollout_is)
        batch = replace(batch, loss_weights=weights)
    estimates, returns = advantages(batch, algorithm)
    batch = replace(batch, advantages=estimates, returns=returns)
    return batch if batch.ends is None else batch.flatten()


def _moved_outputs(batch: RolloutBatch, numbers: torch.Generator) -> ModelOutputs:
    """Returns outputs [B,T] for a batch, near its old ones."""
    assert batch.log_probs is not None
    shape = batch.action_mask.shape
    noise = [MOVED * torch.randn(shape, generator=numbers) for _ in range(2)]
    return ModelOutputs(
        log_probs=batch.log_probs + noise[0],
        entropy=torch.rand(shape, generator=numbers),
        values=None if batch.values is None else batch.values + noise[1],
        full_kl=torch.rand(shape, generator=numbers),
    )


def widened(batch: RolloutBatch, columns: Tensor, width: int, fill: float) -> RolloutBatch:
    """Returns the batch with its columns at `columns` [T] of `width`; others have no action and floats `fill`."""
    changed = {
        field.name: None if (tensor := getattr(batch, field.name)) is None else wide(tensor, columns, width, fill)
        for field in dataclasses.fields(batch)
        if field.name != "inputs"
    }
    inputs = {name: wide(tensor, columns, width, fill) for name, tensor in batch.inputs.items()}
    return dataclasses.replace(batch, inputs=inputs).with_fields(changed)


def wide_outputs(outputs: ModelOutputs, columns: Tensor, width: int, fill: float) -> ModelOutputs:
    """Returns `outputs` for a batch that was `widened` with the same columns."""
    present: Mapping[str, Tensor] = {name: tensor for name, tensor in vars(outputs).items() if tensor is not None}
    return ModelOutputs(**{name: wide(tensor, columns, width, fill) for name, tensor in present.items()})


def wide(tensor: Tensor, columns: Tensor, width: int, fill: float) -> Tensor:
    """Returns [B,T,...] as [B,width,...]; tensors [B] stay as they are."""
    if tensor.dim() < 2:
        return tensor
    value = fill if tensor.is_floating_point() else 0
    result = torch.full((tensor.shape[0], width, *tensor.shape[2:]), value, dtype=tensor.dtype)
    result[:, columns] = tensor
    return result
