"""The picture of a run's timeline."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rl_platform.launch.tools.timeline import PHASE_COLOR, read_lanes, shown, text_color
from rl_platform.runners.watching.trace_file import trace_events
from rl_platform.tracing import TraceSpan

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
SPANS = [
    TraceSpan("run", "steps", "step", "start", 10.0, 1.0),
    TraceSpan("run", "steps", "step", "step 1", 11.0, 1.0),
    TraceSpan("run", "steps", "step", "step 2", 12.0, 2.0),
    TraceSpan("run", "runner", "phase", "collect", 11.0, 0.9),
    TraceSpan("actor[0]", "actor[0]", "call", "update", 12.5, 1.0),
    TraceSpan("actor[0]", "actor[0]", "wait", "rollouts: empty", 12.6, 0.5),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "trace.json").write_text(json.dumps(trace_events(SPANS)))
    return tmp_path


def test_lanes_and_the_last_steps(run: Path) -> None:
    lanes = read_lanes(run)
    assert {lane: [event["name"] for event in events] for lane, events in lanes.items()} == {
        "runner": ["collect"],
        "steps": ["start", "step 1", "step 2"],
        "actor[0]": ["update", "rollouts: empty"],
    }
    assert shown(lanes, 1) == (2e6, 4e6)
    assert shown(lanes, 9) == (0, 4e6)


@needs_matplotlib
def test_png(run: Path, tool) -> None:
    assert tool("timeline", run, "-o", run / "new" / "timeline.png").code == 0
    assert (run / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
@pytest.mark.parametrize("content", [None, "{", "[]", '{"traceEvents": []}'])
def test_a_file_that_is_no_timeline_is_refused(content: str | None, tmp_path: Path, tool) -> None:
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    ended = tool("timeline", tmp_path, "-o", tmp_path / "x.png")
    assert ended.code == (2 if content is None else 65)
    assert "trace" in ended.err or "timeline" in ended.err


def test_text_is_readable_on_its_fill() -> None:
    assert text_color("#ffffff") == text_color(PHASE_COLOR) == "black"
    assert text_color("#000000") == text_color("#1f4e79") == "white"
