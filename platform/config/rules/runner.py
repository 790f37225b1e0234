"""Rules of `runner`: the run as a whole."""

from __future__ import annotations

from pathlib import Path

from rl_platform.config.rules.rule import TASK, Rule, embodied

STALENESS = "runner.max_staleness"

REFUSED = (
    Rule(
        "runner.resume",
        lambda config: config.runner.resume not in ("auto", "never") and not Path(config.runner.resume).exists(),
        "neither auto nor never, and no checkpoint is at this path",
    ),
    Rule(
        STALENESS,
        lambda config: (
            config.runner.max_staleness
            and config.algorithm.rollout_is is None
            and config.algorithm.old_log_probs != "rollout"
        ),
        "rollouts come from weights one update old: without a correction they would count as new",
        ("algorithm.rollout_is",),
        "algorithm.rollout_is: {}",
    ),
)

WITHOUT_EFFECT = tuple(
    Rule(f"runner.{name}", embodied, "embodied training has no data set and no texts", (TASK,))
    for name in ("max_epochs", "log_samples")
)
