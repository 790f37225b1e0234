"""Counts the optimizer steps, rows and sequences of a step on one rank."""

from __future__ import annotations

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Parallel, Trainable


def optimizer_steps(config: Config, component: str) -> int:
    """Returns the optimizer steps of a learner in one PPO step."""
    algorithm = config.algorithm
    epochs = algorithm.critic_epochs if component == "critic" else algorithm.ppo_epochs
    return epochs * max(1, config.rows_per_step // config.mini_batch_size(component))


def copies(config: Config, component: str, ranks: int) -> int:
    """Returns into how many shares `ranks` ranks divide a batch: tensor, pipeline and context ranks share rows."""
    return data_parallel(config.section(component), ranks) if component in ("actor", "critic", "reference") else ranks


def data_parallel(section: Trainable, ranks: int) -> int:
    """Returns the number of copies of a learner's model that share the rows of a mini-batch."""
    parallel = layout_of_learner(section)
    return max(1, ranks // (parallel.tensor * parallel.pipeline * parallel.context))


def forward_rows(config: Config, component: str, ranks: int, length: float | None = None) -> int:
    """Returns the rows of one forward without gradient on one rank. length: as of `micro_batch_rows`."""
    rows, section = -(-config.rows_per_step // ranks), config.section(component)
    if limit := config.algorithm.logprob_forward_micro_batch_size:
        return min(rows, limit)
    if section.micro_batch_size or section.max_tokens_per_micro_batch:
        return micro_batch_rows(config, component, ranks, length)
    return rows


def micro_batch_rows(config: Config, component: str, ranks: int, length: float | None = None) -> int:
    """Returns the rows of one forward and backward on one rank: its share of a mini-batch, or the configured limit.

    length: mean tokens of a row; None: the greatest length.
    """
    section = config.section(component)
    rows = -(-config.mini_batch_size(component) // ranks)
    if section.micro_batch_size:
        rows = min(rows, section.micro_batch_size)
    if section.max_tokens_per_micro_batch:
        rows = min(rows, max(1, int(section.max_tokens_per_micro_batch // (length or config.data.longest_sequence))))
    return rows


def running_sequences(config: Config, ranks: int) -> int:
    """Returns how many sequences one rollout rank decodes together, in training or validation."""
    return min(config.rollout.running_limit, rows_of_rollout(config, ranks))


def rows_of_rollout(config: Config, ranks: int) -> int:
    """Returns how many sequences one rollout rank generates in a rollout or in a validation, whichever is more."""
    rows = max(config.prompts_in_flight * config.algorithm.group_size, config.data.validation_prompts)
    return -(-rows // ranks)


def layout_of_learner(section: Trainable) -> Parallel:
    """Returns which ranks of a learner work on the same rows; of tensor and pipeline ranks one where its backend
    shards."""
    return section.parallel if section.training_backend == "megatron" else Parallel(context=section.parallel.context)
