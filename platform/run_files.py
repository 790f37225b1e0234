"""Names of files in the output folder of a run that several modules read or write, and its complete checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

CONFIG = "config.yaml"  # with all defaults; marks the folder of a run
METRICS = "metrics.jsonl"  # a line per step
MANIFEST = "manifest.json"  # of a checkpoint; complete checkpoints have it
FINISHED = "finished"  # the last step and the exports are done; not empty: the data was used up
STEP_FOLDER = re.compile(r"step-(\d{8,})")  # the name of a checkpoint


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the folders of complete checkpoints in a folder `checkpoints`, by step, ascending. Verifies nothing.

    Leaves out folders of other names, as the copy step-00000040.bak of a user.
    """
    complete = [path.parent for path in folder.glob(f"step-[0-9]*/{MANIFEST}")]
    named = [(STEP_FOLDER.fullmatch(path.name), path) for path in complete]
    return dict(sorted((int(name[1]), path) for name, path in named if name))
