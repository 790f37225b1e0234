"""Divides the batches of a config over the ranks of a placement."""

from __future__ import annotations

from dataclasses import dataclass

from rl_platform.config.schema import Config
from rl_platform.placement.estimates.workload import copies
from rl_platform.placement.layout import Layout


@dataclass(frozen=True)
class Division:
    """The division of the rows of a batch over the ranks of a component.

    key: config key of the batch. together: ranks that work on the same rows.
    """

    key: str
    rows: int
    component: str
    ranks: int
    together: int = 1

    @property
    def shares(self) -> int:
        return self.ranks // self.together

    @property
    def even(self) -> bool:
        return self.rows % self.shares == 0

    @property
    def most(self) -> int:
        """The largest number of rows of a rank."""
        return -(-self.rows // self.shares)

    @property
    def idle_ranks(self) -> int:
        return max(0, self.shares - self.rows) * self.together

    def __str__(self) -> str:
        ranks = f"{self.ranks} {self.component} rank{'s' if self.ranks > 1 else ''}"
        if self.together > 1:
            ranks = f"{self.shares} x {self.together} {self.component} ranks"
        if self.idle_ranks:
            each = f"1 each, {self.idle_ranks} ranks get none"
        elif self.even:
            each = f"{self.most} each" if self.shares > 1 else "all"
        else:
            each = f"{self.most} or {self.most - 1} each"
        return f"{self.key}: {self.rows} rows over {ranks}: {each}"


def divisions(config: Config, layout: Layout) -> tuple[Division, ...]:
    """Returns the division of every batch of a step."""
    shared: list[Division] = []
    if config.runner.task_type == "embodied":
        wanted = [("env.num_envs", config.env.num_envs, "env")]
    else:
        rows = config.rows_per_step
        grouped = config.algorithm.group_size > 1
        key = "data.train_batch_size * algorithm.group_size" if grouped else "data.train_batch_size"
        wanted = [(key, rows, "rollout"), (key, rows, "reference")]
    own = config.critic.mini_batch_size is not None
    for name in (layout.policy, "critic"):
        key = "critic.mini_batch_size" if own and name == "critic" else "data.mini_batch_size"
        wanted.append((key, config.mini_batch_size(name), name))
    for key, rows, name in wanted:
        if name in layout.parts:
            ranks = layout.parts[name].ranks
            shared.append(Division(key, rows, name, ranks, ranks // copies(config, name, ranks)))
    return tuple(shared)
