"""The drawn evaluation episode of a run as a file of the Rerun viewer: pictures above, reward and return below."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

from rl_platform.errors import DataError


def write(run: Path, output: Path) -> None:
    """Raises DataError if the run has drawn no episode, its files are damaged, or rerun-sdk is not installed."""
    video, facts = run / "evaluation.mp4", _facts(run)
    try:
        import rerun
    except ImportError as error:
        raise DataError("rerun-sdk is not installed; pip install rerun-sdk") from error
    recording = rerun.RecordingStream(f"rl-platform {run.resolve().name}", recording_id=f"step {facts['step']}")
    recording.save(output)
    pictures = rerun.AssetVideo(path=video)
    recording.log("episode", pictures, static=True)
    stamps = pictures.read_frame_timestamps_nanos()
    steps = [number * facts["steps_per_picture"] for number in range(len(stamps))]
    shown = rerun.VideoFrameReference.columns_nanos(stamps)
    recording.send_columns("episode", [rerun.TimeColumn("step", sequence=steps)], shown)
    rewards = facts["rewards"]
    for name, numbers in (("reward", rewards), ("return", list(accumulate(rewards)))):
        line = [rerun.TimeColumn("step", sequence=range(len(numbers)))]
        recording.send_columns(name, line, rerun.Scalars.columns(scalars=numbers))
    recording.disconnect()


class Drawn(TypedDict):
    """The drawn episode of `evaluation.json`."""

    step: int
    steps_per_picture: int
    rewards: list[float]


def _facts(run: Path) -> Drawn:
    """`evaluation.json`, checked."""
    path = run / "evaluation.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(facts["step"], int) and isinstance(facts["steps_per_picture"], int)
        numbers = all(isinstance(reward, int | float) for reward in facts["rewards"])
    except OSError as error:
        hint = "embodied runs with env.evaluation.video: true draw an episode"
        raise DataError(f"{path}: {error.strerror}; {hint}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the facts of a drawn episode ({type(error).__name__}: {error})") from error
    if not (whole and numbers):
        raise DataError(f"{path}: not the facts of a drawn episode")
    return Drawn(step=facts["step"], steps_per_picture=facts["steps_per_picture"], rewards=facts["rewards"])
