"""Chains of components: phases of one stage of a PPO step that run one after the other, beside other chains.

    [reference] [log-probs] [values]        [train critic] [train actor]

The phases of a stage are independent, except for a full KL, which the actor computes from the reference's states. The
placement decides which of them share devices. Reference log-probs, log-probs and values of a response depend on that
response only, so a component that shares no device with the rollout starts before the batch is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rl_platform.config.schema import Config
from rl_platform.placement.layout import Layout

LEAST_PARTS = 4  # of a batch: the last part waits for the last response, so it must be small


def chains(components: Iterable[str], config: Config, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Returns the components in chains. Components of a chain share devices or need results of one another, and work in
    this order. Chains work side by side."""
    separate: list[tuple[str, ...]] = []
    for name in components:
        linked = [chain for chain in separate if any(_linked(name, other, config, layout) for other in chain)]
        separate = [chain for chain in separate if chain not in linked]
        separate.append((*(other for chain in linked for other in chain), name))
    return tuple(separate)


def _linked(name: str, other: str, config: Config, layout: Layout) -> bool:
    compared = config.algorithm.full_kl_in_reward and {name, other} == {"reference", "actor"}
    return compared or other in layout.sharing[name]


def streaming_chains(config: Config, layout: Layout, leaving: Collection[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Returns the chains of components that evaluate finished responses while others are generated.

    leaving: components that are on their devices only in their own phases. Empty if rows may be dropped or postponed
    (dynamic sampling, partial rollouts), if the models are trained meanwhile (`runner.max_staleness`), and for embodied
    runs, whose values come with the actions.
    """
    algorithm = config.algorithm
    waiting = algorithm.dynamic_sampling is not None or config.rollout.partial_rollout is not None
    if config.runner.task_type == "embodied" or waiting or config.runner.max_staleness:
        return ()
    evaluating = ["reference", *(["actor"] if algorithm.old_log_probs == "recompute" else []), "critic"]
    placed = [name for name in evaluating if name in layout.parts and name not in leaving]
    names = [name for name in placed if "rollout" not in layout.sharing[name]]
    if algorithm.full_kl_in_reward and "reference" not in names and "actor" in names:
        names.remove("actor")  # it needs the reference's hidden states, which are computed later
    return chains(names, config, layout)


def part_rows(config: Config, layout: Layout, names: Collection[str]) -> int:
    """Returns the rows of a part: one forward pass of these components on all their ranks, or a share of the batch."""
    forward = config.algorithm.logprob_forward_micro_batch_size
    ranks = {name: layout.parts[name].ranks for name in names}
    wanted = max((forward or micro_batch_rows(config, name, count)) * count for name, count in ranks.items())
    return min(wanted, -(-config.rows_per_step // LEAST_PARTS))


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
