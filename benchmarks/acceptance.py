"""Whether a run of a recipe reached the result that its source reports.

    python benchmarks/acceptance.py runs/qwen2.5_1.5b_gsm8k_vapo

Reads metrics.jsonl and config.yaml of the run's folder; `runner.experiment_name` says which recipe it is. Prints each
limit beside the value that the run has at that step. Exit code 0: all hold; 1: one does not; 2: no limits are known for
this run; 65: the folder holds no run. Not covered: whether the run used the recipe unchanged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rl_platform.errors import DataError
from rl_platform.metrics import read_metrics


@dataclass(frozen=True)
class Limit:
    """The value of `metric` at PPO step `step` is above `above`. source: who published it."""

    metric: str
    above: float
    step: int
    source: str

    def __str__(self) -> str:
        return f"`{self.metric}` > {self.above:g} at step {self.step}"

    def value(self, rows: Sequence[dict[str, float]]) -> float:
        """Returns the metric at the step; NaN if the run has none there."""
        found = [row[self.metric] for row in rows if row.get("step") == self.step and self.metric in row]
        return found[-1] if found else math.nan


VERL, NEMO = "verl, PPO page: 56.7 %", "NeMo-RL, tests of its PPO recipes"
ACCEPTANCE = {
    "qwen2.5_0.5b_gsm8k": (Limit("val/accuracy", 0.55, 435, VERL),),
    "qwen2.5_1.5b_gsm8k": (Limit("reward/raw_mean", 0.75, 40, NEMO), Limit("val/accuracy", 0.65, 40, NEMO)),
    "qwen2.5_1.5b_gsm8k_vapo": (Limit("reward/raw_mean", 0.85, 100, NEMO), Limit("val/accuracy", 0.7, 100, NEMO)),
    "deepseek_r1_7b_dapo": (Limit("val/accuracy", 0.42, 40, NEMO),),
}


def verdicts(name: str, rows: Sequence[dict[str, float]]) -> list[tuple[Limit, float]]:
    """Returns the limits of the recipe with this experiment name, each with the run's value."""
    return [(limit, limit.value(rows)) for limit in ACCEPTANCE.get(name, ())]


def main(words: Sequence[str]) -> int:
    if len(words) != 1:
        print("usage: python benchmarks/acceptance.py RUN, the output folder of a run", file=sys.stderr)
        return 2
    folder = Path(words[0])
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        name, rows = config["runner"]["experiment_name"], read_metrics(folder)
    except (OSError, yaml.YAMLError, KeyError, TypeError, DataError) as error:
        print(f"{folder}: not the output folder of a run: {error}", file=sys.stderr)
        return 65
    found = verdicts(name, rows)
    if not found:
        print(f"{name}: no limits are known; they are of {', '.join(ACCEPTANCE)}", file=sys.stderr)
        return 2
    for limit, value in found:
        last = max((int(row.get("step", 0)) for row in rows), default=0)
        shown = f"not measured there; the last step is {last}" if math.isnan(value) else f"{value:.4g}"
        print(f"{'passed' if value > limit.above else 'failed'}  {limit}: {shown}  ({limit.source})")
    return 0 if all(value > limit.above for limit, value in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
