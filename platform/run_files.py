"""Names of files in the output folder of a run that several modules read or write, and its complete checkpoints."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.yaml"  # with all defaults; marks the folder of a run
METRICS = "metrics.jsonl"  # a line per step
MANIFEST = "manifest.json"  # of a checkpoint; complete checkpoints have it
FINISHED = "finished"  # empty: the last step and the exports are done


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the folders of complete checkpoints in a folder `checkpoints`, by step, ascending. Verifies nothing."""
    complete = [path.parent for path in folder.glob(f"step-[0-9]*/{MANIFEST}")]
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in complete))
