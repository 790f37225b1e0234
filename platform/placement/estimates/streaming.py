"""The chains of components that evaluate finished responses while others are generated, and the rows of a part.

Reference log-probs, log-probs and values of a response depend on that response only. A component that shares no device
with the rollout therefore starts before the batch is complete.
"""

from __future__ import annotations

from collections.abc import Collection

from rl_platform.config.schema import Config
from rl_platform.placement.chains import chains
from rl_platform.placement.estimates.workload import micro_batch_rows
from rl_platform.placement.layout import Layout

LEAST_PARTS = 4  # of a batch: the last part waits for the last response, so it must be small


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
