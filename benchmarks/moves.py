"""What a move of `cluster.reallocate: auto` gains beside its prediction, for a reward function that waits.

    python benchmarks/moves.py        # about four minutes on a quiet machine

The same run twice, on four CPU workers: one of them scores, and its only scoring process waits for each response. With
`off` it stays there. With `auto` it measures its steps, predicts a better placement and moves. Printed: median seconds
of a step before and after the move, beside the plan's, and whether both runs counted the same rewards.
Not covered: GPUs, and other causes of an imbalance.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _common import machine
from plan_accuracy import CODE, QUIET, ROOT, workers

from rl_platform.metrics import read_metrics

WAITS = """
import time

def score(response, answer, metadata):
    time.sleep({wait_s})
    return float(len(response.encode()) % 3 == 0)
"""
MOVE = re.compile(r"moves after step (\d+)")
AFTER = re.compile(r"after the move a step takes .*?; the move took [\d.]+ m?s")


def run(reallocate: str, steps: int, wait_s: float, folder: Path) -> str:
    """Returns what the run printed. Raises SystemExit if it fails."""
    reward = folder / "waiting.py"
    reward.write_text(WAITS.format(wait_s=wait_s), encoding="utf-8")
    keys = [
        *QUIET,
        *workers(4, "'actor,critic': 0, 'rollout,reward': 1"),
        f"cluster.reallocate={reallocate}",
        "data.train_batch_size=64",
        "data.val_size=4",
        "reward.num_workers=1",
        f"reward.type={reward}:score",
        f"runner.max_steps={steps}",
        f"runner.output_dir={folder / reallocate}",
    ]
    command = [sys.executable, "-c", CODE, str(ROOT / "configs/reasoning/ppo_tiny.yaml"), *keys]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"the run with {reallocate} ended with exit code {ended.returncode}")
    return " ".join(ended.stdout.split())


def seconds(rows: Sequence[dict[str, float]], first: int, last: int) -> float:
    """The median step of these numbers, both included."""
    return statistics.median(row["time/step"] for row in rows if first <= row.get("step", -1) <= last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait-s", type=float, default=0.12, help="of the reward function, for each response")
    parser.add_argument("--after", type=int, default=7, help="steps after the move, at least 7")
    given = parser.parse_args()
    machine(["torch", "ray"])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        steps = 6 + given.after
        printed = run("auto", steps, given.wait_s, folder)
        if (move := MOVE.search(printed)) is None:
            raise SystemExit(f"the run did not move:\n{printed[-2000:]}")
        run("off", steps, given.wait_s, folder)
        moved, stayed = (read_metrics(folder / name) for name in ("auto", "off"))
        at = int(move[1])
        if (note := AFTER.search(printed)) is not None:
            print(note[0])
        print(f"auto, steps 2 to {at - 1}: {seconds(moved, 2, at - 1):.2f} s")
        print(f"auto, steps {at + 2} to {steps}: {seconds(moved, at + 2, steps):.2f} s")
        print(f"off, steps {at + 2} to {steps}: {seconds(stayed, at + 2, steps):.2f} s")
        rewards = [[row.get("reward/mean") for row in rows if row.get("step", 0) > 0] for rows in (moved, stayed)]
        same = sum(one == other for one, other in zip(*rewards, strict=True))
        print(f"steps with the same mean reward in both runs: {same} of {steps}")


if __name__ == "__main__":
    main()
