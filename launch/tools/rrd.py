"""The drawn evaluation episode of a run as a file of the Rerun viewer: pictures above, reward and return below.

The instruction of a vision-language-action policy is a text beside them.
"""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

from rl_platform.errors import ConfigError, DataError, Problem, check_all
from rl_platform.launch.tools.named_runs import check_runs
from rl_platform.launch.written import check_output, writing

FACTS = "evaluation.json"  # of the drawn episode
ENDINGS = (".rrd",)


def write(run: Path, output: Path) -> None:
    """Raises ConfigError if the run has drawn no episode, `output` cannot be written, or rerun-sdk is not installed.
    Raises DataError if the files of the episode are damaged."""
    reason = "embodied runs with env.evaluation.video: true draw an episode"
    check_all(_require_rerun, partial(check_runs, [run], FACTS, reason), partial(check_output, output, ENDINGS))
    with writing(output, ENDINGS) as stage:
        _record(run, stage)


def _require_rerun() -> None:
    try:
        import rerun  # noqa: F401
    except ImportError as error:
        hint = "pip install rerun-sdk"
        raise ConfigError([Problem("rrd", "rerun-sdk is not installed", hint=hint)]) from error


def _record(run: Path, file: Path) -> None:
    import rerun

    folder = run if run.is_dir() else run.parent
    video, facts = folder / "evaluation.mp4", _facts(folder / FACTS)
    name = re.sub(r"[^\w-]+", "-", folder.resolve().name, flags=re.ASCII)  # Rerun accepts no other characters
    recording = rerun.RecordingStream(f"rl-platform {name}", recording_id=f"step {facts['step']}")
    recording.save(file)
    try:
        pictures = rerun.AssetVideo(contents=video.read_bytes(), media_type="video/mp4")
        stamps = pictures.read_frame_timestamps_nanos()
    except (OSError, RuntimeError) as error:
        raise DataError(f"{video}: not a video: {error}") from error
    recording.log("episode", pictures, static=True)
    steps = [number * facts["steps_per_picture"] for number in range(len(stamps))]
    shown = rerun.VideoFrameReference.columns_nanos(stamps)
    recording.send_columns("episode", [rerun.TimeColumn("step", sequence=steps)], shown)
    rewards = facts["rewards"]
    for name, numbers in (("reward", rewards), ("return", list(accumulate(rewards)))):
        line = [rerun.TimeColumn("step", sequence=range(len(numbers)))]
        recording.send_columns(name, line, rerun.Scalars.columns(scalars=numbers))
    if facts["instruction"]:
        recording.log("instruction", rerun.TextDocument(facts["instruction"]), static=True)
    recording.disconnect()


class Drawn(TypedDict):
    """The drawn episode of `evaluation.json`."""

    step: int
    steps_per_picture: int
    rewards: list[float]
    instruction: str  # empty: the policy reads none


def _facts(path: Path) -> Drawn:
    """`evaluation.json`, checked."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        counts = facts["step"], facts["steps_per_picture"]
        whole = all(isinstance(count, int) and 0 <= count < 10**9 for count in counts)
        numbers = all(isinstance(reward, int | float) for reward in facts["rewards"])
        instruction = str(facts.get("instruction", ""))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not the facts of a drawn episode ({type(error).__name__}: {error})") from error
    if not (whole and numbers):
        raise DataError(f"{path}: not the facts of a drawn episode")
    step, steps_per_picture = counts
    return Drawn(step=step, steps_per_picture=steps_per_picture, rewards=facts["rewards"], instruction=instruction)
