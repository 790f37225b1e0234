"""Rules and idle keys of the smaller controls: what a loss is divided by, credit, clipping, old log-probs."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.schema import Config

IdleControl = tuple[str, str, tuple[str, ...]]  # key, why it does nothing, the keys that decide it


def idle_controls(config: Config) -> Iterator[IdleControl]:
    """Those of the keys here that do nothing in this config."""
    yield from _idle_denominators(config)


def _idle_denominators(config: Config) -> Iterator[IdleControl]:
    algorithm = config.algorithm
    aggregation, coefficient = "algorithm.loss_agg_func", "algorithm.positive_nll_coef"
    if algorithm.loss_agg_func in ("token-mean", "token-sum"):
        reason = f"{aggregation} {algorithm.loss_agg_func} does not divide by a number of sequences"
        yield "algorithm.loss_agg_denominator", reason, (aggregation,)
    if not algorithm.positive_nll_coef:
        yield "algorithm.positive_nll_norm", f"{coefficient} is 0: the term is off", (coefficient,)
