"""Measures the use of the hardware: model FLOPs of a step, and the peak memory of the components.

`Reporters` divides the FLOPs by the time of a step and the arithmetic peak of the devices (`perf/mfu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.extras import is_present
from rl_platform.placement.decisions import ESTIMATES
from rl_platform.records import RolloutBatch
from rl_platform.runtime.worker_group import WorkerGroup

if TYPE_CHECKING:
    from rl_platform.placement.estimates.model_shape import ModelShape

GIB = 2**30
BACKWARD = 2  # forwards that a backward is worth; with adapters, whose matrices need no gradient, 1


class Utilization:
    """Metrics of one step; `groups` are the run's worker groups by component."""

    def __init__(self, config: Config, groups: Mapping[str, WorkerGroup]) -> None:
        self.config, self.groups = config, groups
        self.shapes = language_shapes(config)

    def metrics(self, batch: RolloutBatch, trains_actor: bool) -> dict[str, float]:
        """Returns `perf/memory_peak` (GiB, of the fullest rank so far; per component too) and, for language models of
        known shape, `perf/flops`."""
        peaks = {name: group.memory_peak() / GIB for name, group in self.groups.items()}
        metrics = {f"perf/memory_peak/{name}": peak for name, peak in peaks.items()}
        metrics["perf/memory_peak"] = max(peaks.values(), default=0.0)
        passes = self._passes(trains_actor)
        if "lengths" in batch.inputs and passes.keys() <= self.shapes.keys():
            lengths = batch.inputs["lengths"].double()
            tokens, squares = float(lengths.sum()), float(lengths.square().sum())
            flops = (count * forward_flops(self.shapes[name], tokens, squares) for name, count in passes.items())
            metrics["perf/flops"] = sum(flops)
        return metrics

    def _passes(self, trains_actor: bool) -> dict[str, int]:
        """Returns the passes of each component over the rollout, in forwards; generation counts as one."""
        algorithm = self.config.algorithm
        epochs = {"actor": algorithm.ppo_epochs * trains_actor, "critic": algorithm.critic_epochs}
        passes = {"actor": 1 + (algorithm.old_log_probs == "recompute") + self.config.reference_is_base}
        if self.config.critic.use_critic_model:
            passes["critic"] = 1
        for name in passes:
            passes[name] += epochs[name] * (1 + (BACKWARD if self.config.section(name).lora is None else 1))
        if self.config.has_reference:
            passes["reference"] = 1
        return passes


def language_shapes(config: Config) -> dict[str, ModelShape]:
    """Returns the known shapes of language models by component; none if the estimates are not installed."""
    if not is_present(ESTIMATES):
        return {}
    from rl_platform.placement.estimates.component_shapes import shapes
    from rl_platform.placement.estimates.model_shape import ModelShape

    return {name: shape for name, shape in shapes(config)[0].items() if isinstance(shape, ModelShape)}


def forward_flops(shape: ModelShape, tokens: float, squares: float) -> float:
    """Returns the FLOPs of a forward over sequences with `tokens` tokens in all and the sum `squares` of their squared
    lengths."""
    # 2 (tokens * products per token + layers * width * sum of L^2): scores and values each see L^2 / 2 pairs
    return 2 * (tokens * shape.products_per_token + squares * shape.layers * shape.attention_width)
