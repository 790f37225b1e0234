"""The terminal view: everything of interest is on the screen at any size, nothing breaks it, and it costs little."""

from __future__ import annotations

import gc
import io
import math
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waiting import until

from rl_platform.config.schema import Config
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.launch.session import last_step
from rl_platform.launch.views import plain
from rl_platform.launch.views.headline import History, duration, number
from rl_platform.launch.views.live_view import LiveView, printable, sparkline
from rl_platform.launch.views.plain import PlainView, terminal_view
from rl_platform.metrics import RunLog
from rl_platform.reporter import Reporter, Reporters, RunInfo, Sample
from rl_platform.runners.watching.trace_file import Timeline

CARD = [("estimator", "GAE, lambda 0.95"), ("policy loss", "clip [0.8, 1.28] dual 3.0")]
METRICS = {
    "reasoning": {
        "reward/mean": 0.53,
        "val/accuracy": 0.42,
        "actor/approx_kl": 0.00125,
        "actor/clip_frac": 0.125,
        "actor/entropy": 1.25,
        "critic/explained_var": 0.625,
        "len/response_mean": 4.25,
        "perf/tokens_per_sec": 1203.0,
        "time/step": 8.4,
        "time/generate": 4.1,
    },
    "embodied": {
        "episode/return": 1234.0,
        "val/return": 2345.0,
        "episode/length": 1000.0,
        "actor/approx_kl": 0.00125,
        "critic/explained_var": 0.625,
        "perf/env_steps_per_sec": 8123.0,
        "time/step": 2.0,
    },
}


def console(width: int = 100, height: int = 30, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, legacy_windows=False)


def info(folder: Path, task: str = "reasoning", resumed: int | None = None) -> RunInfo:
    return RunInfo("my_run", task, folder, 12, "configs/x.yaml", resumed, CARD, "component  node 0\nactor      0-7")


def screen(view: LiveView) -> str:
    """What the live area shows now, as plain text."""
    target = Console(file=io.StringIO(), width=view.console.width, height=view.console.height)
    target.print(view)
    return target.file.getvalue()


@pytest.fixture
def view(tmp_path: Path):
    view = LiveView(console())
    view.start(info(tmp_path))
    yield view
    view.close()


def test_the_screen_shows_what_matters(view: LiveView) -> None:
    view.step(1, METRICS["reasoning"])
    view.step(2, METRICS["reasoning"])
    view.samples(2, [Sample("1+1?", "2", 1.0)])
    with view.phase("generate"):
        view.progress(34, 64, "responses", tokens_per_s=999.0)
        text = screen(view)
    for part in ("my_run", "configs/x.yaml", "2/12", "ETA 1:24", "generate", "34/64 responses", "999.0 tokens_per_s"):
        assert part in text
    for part in ("0.530", "0.420", "0.0013", "0.125", "1.250", "0.625", "4.250", "1,203", "1+1?", "reward 1.000"):
        assert part in text
    assert "34/64" not in screen(view)  # the phase is over


def test_embodied_numbers(tmp_path: Path) -> None:
    view = LiveView(console())
    view.start(info(tmp_path, "embodied"))
    view.step(1, METRICS["embodied"] | {"val/success_once": 0.3})
    text = screen(view)
    view.close()
    for part in ("1,234", "2,345", "1,000", "8,123", "entropy     –", "val success 0.300"):
        assert part in text


def test_the_commands_for_curves_and_report_are_quoted(tmp_path: Path) -> None:
    lines = dict(History.of(info(tmp_path)).summary(info(tmp_path / "my runs")))
    assert lines["curves"] == f"rl-platform plot '{tmp_path}/my runs'"
    assert lines["what happened"] == f"rl-platform report '{tmp_path}/my runs'"


RATES = {"env/success_once": 0.25, "val/success_once": 0.875}


def test_success_is_shown_where_a_run_reports_it(tmp_path: Path) -> None:
    for terminal in (True, False):
        view = LiveView(console()) if terminal else PlainView(console(terminal=False))
        view.start(info(tmp_path, "embodied"))
        view.step(1, METRICS["embodied"])
        before = screen(view) if terminal else view.console.file.getvalue()
        view.step(2, METRICS["embodied"] | RATES)
        view.step(3, METRICS["embodied"] | {"env/success_once": 0.5, "val/success_once": 0.75})
        after = screen(view) if terminal else view.console.file.getvalue()
        view.close()
        assert "val success" not in before
        for part in ("success", "0.250", "val success", "0.875"):
            assert part in after
        assert "val/success_once" in view.console.file.getvalue()
        assert "best 0.875 (step 2), last 0.750 (step 3)" in view.console.file.getvalue()


@pytest.mark.parametrize("task", ["reasoning", "embodied"])
@pytest.mark.parametrize("height", [1, 2, 5, 24])
@pytest.mark.parametrize("width", [1, 2, 10, 39, 80, 300])
def test_no_size_breaks_it(tmp_path: Path, task: str, width: int, height: int) -> None:
    view = LiveView(console(width, height))
    view.start(info(tmp_path, task))
    for step in range(1, 200):
        view.step(step, METRICS[task] | {"reward/mean": math.nan if step % 3 == 0 else step})
    view.samples(1, [Sample("宽" * 500, "\x1b[31m\r\n\x07" * 100, math.nan)])
    with view.phase("a phase with a long name"), view.phase("inner"):
        view.progress(5, 0, "things")
        lines = screen(view).rstrip("\n").split("\n")
    view.close()
    assert len(lines) <= height
    assert all(Console().measure(line).maximum <= width for line in lines)
    assert "\x1b[31m" not in "".join(lines)


def test_card_and_placement_notes_and_prints_above_and_the_summary_at_the_end(tmp_path: Path) -> None:
    view = LiveView(console())
    view.start(info(tmp_path))
    view.note("checkpoint [bold] saved")
    print("stray")
    for step, accuracy in ((0, 0.1), (1, 0.6), (2, 0.4)):
        view.step(step, METRICS["reasoning"] | {"val/accuracy": accuracy})
    view.close()
    view.close()  # twice is fine
    text = view.console.file.getvalue()
    for part in ("GAE, lambda 0.95", "clip [0.8, 1.28] dual 3.0", "actor      0-7", "[bold] saved", "stray"):
        assert part in text
    for part in ("best 0.600 (step 1), last 0.400 (step 2)", str(tmp_path)[:40]):
        assert part in text


def test_the_summary_calls_a_validation_before_training_no_best(tmp_path: Path) -> None:
    history = History.of(info(tmp_path))
    history.add(0, {"val/accuracy": 0.25})
    history.add(1, {"reward/mean": 0.5})
    summary = dict(history.summary(info(tmp_path)))
    assert summary["val/accuracy"] == "0.250 before training (step 0), not measured since"
    history.add(2, {"val/accuracy": 0.125})
    summary = dict(history.summary(info(tmp_path)))
    assert summary["val/accuracy"] == "best 0.250 (step 0), last 0.125 (step 2)"


def test_history_goes_on_after_resume(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start(info(tmp_path))
    for step in range(1, 6):
        log.step(step, {"reward/mean": float(step)})
    log.close()
    history = History.of(info(tmp_path, resumed=3))
    assert history.series("reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert history.step == 3
    assert History.of(info(tmp_path)).count == 0


def test_a_long_run_costs_what_a_short_one_does(tmp_path: Path) -> None:
    """Memory and work per step of all reporters do not depend on how many steps there were."""
    plain_view, live = PlainView(console(terminal=False)), LiveView(console())
    live.prepare(info(tmp_path), History.of(info(tmp_path)))
    reporters = Reporters([RunLog(tmp_path), Timeline(tmp_path / "trace.json", 0), plain_view])
    reporters.start(info(tmp_path))
    reporters.sinks.append(live)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def steps(numbers: range) -> None:
        for step in numbers:
            with reporters.phase("generate"):
                reporters.progress(1, 2, "responses")
            reporters.samples(step, [Sample("1+1?", "2", 1.0)])
            reporters.step(step, {name: value + step for name, value in METRICS["reasoning"].items()})
            plain_view.console.file.seek(0)
            plain_view.console.file.truncate()

    def work(numbers: range) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        steps(numbers)
        sys.setprofile(None)
        return calls

    steps(range(1, 1001))
    early = work(range(1001, 1101))
    tracemalloc.start()
    steps(range(1101, 2001))
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    steps(range(2001, 5001))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    late = work(range(5001, 5101))
    reporters.sinks.remove(live)
    reporters.close()
    assert late <= 1.05 * early, "work per step grows with the number of steps"
    assert grown < 30_000, f"{grown / 3000:.1f} bytes per step"


def test_a_curve_of_a_long_run_keeps_its_ends_its_best_and_its_shape(tmp_path: Path) -> None:
    history = History.of(info(tmp_path))
    for step in range(1, 10_001):
        history.add(step, {"reward/mean": float(step), "val/accuracy": 9000 - abs(step - 7000.0), "time/step": 2.0})
    points = history.series("reward/mean")
    assert len(points) <= 256
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(step - 128 <= value <= step for step, value in points)
    summary = dict(history.summary(info(tmp_path)))
    assert summary["reward/mean"] == "first 1.000, last 10,000"
    assert summary["val/accuracy"].startswith("best 9,000 (step 7000), last 6,000 (step 10000)")
    assert summary["time"] == "5:33:20"


def test_a_redraw_costs_the_same_late_in_a_long_run(tmp_path: Path) -> None:
    """The fastest of many, as machines are busy."""
    early, late = redraw_s(tmp_path, steps=100), redraw_s(tmp_path, steps=5000)
    assert late < 2 * early


def redraw_s(tmp_path: Path, steps: int) -> float:
    view = LiveView(console())
    view.start(info(tmp_path))
    for step in range(1, steps + 1):
        view.step(step, METRICS["reasoning"])
    view.samples(1, [Sample("1+1?", "2", 1.0)])
    costs = []
    with view.phase("generate"):
        for done in range(30):
            view.progress(done, 64, "responses", speed=1.0)
            began = time.thread_time()
            view._live.refresh()
            costs.append(time.thread_time() - began)
    view.close()
    return min(costs)


@contextmanager
def training_the_actor(view: Reporter) -> Iterator[None]:
    """Another thread is in that phase, 3 of 8 micro-batches far, until the block ends."""
    begun, over = threading.Event(), threading.Event()

    def train() -> None:
        with view.phase("train actor"):
            view.progress(3, 8, "micro-batches")
            begun.set()
            assert over.wait(60)

    thread = threading.Thread(target=train)
    thread.start()
    assert begun.wait(60)
    yield
    over.set()
    thread.join()


def test_phases_side_by_side_have_a_line_each(view: LiveView) -> None:
    with view.phase("train critic"), training_the_actor(view):
        view.progress(5, 8, "micro-batches")
        lines = screen(view).splitlines()
    assert [line for line in lines if "train critic" in line and "5/8" in line]
    assert [line for line in lines if "train actor" in line and "3/8" in line]


def test_reports_from_many_threads(view: LiveView) -> None:
    errors = []

    def work(name: str) -> None:
        try:
            for done in range(200):
                with view.phase(name):
                    view.progress(done, 200, "rows")
                    screen(view)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"rank {rank}",)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_line_names_the_phases_of_all_threads() -> None:
    clock = Clock()
    view = PlainView(console(width=80, terminal=False), clock)
    with view.phase("train critic"), training_the_actor(view):
        view.progress(5, 8, "micro-batches")
        clock.now += 31
        view.beat()
    view.close()
    assert view.console.file.getvalue().splitlines() == [
        "  train critic: 5 of 8 micro-batches, 31 s",
        "  train actor: 3 of 8 micro-batches, 31 s",
    ]


PHASES = ("load", "sync weights", "collect", "generate", "validate", "train actor", "checkpoint", "export", "")


@pytest.mark.parametrize("phase", PHASES)
def test_no_phase_is_silent_for_30_seconds(phase: str) -> None:
    """Plain output has a line in any 30 s, whether the phase tells its progress or not."""
    clock = Clock()
    view = PlainView(console(terminal=False), clock)
    lines = view.console.file.getvalue
    with view.phase(phase) if phase else nullcontext():
        for second in range(1, 121):
            clock.now += 1
            view.beat()
            assert len(lines().splitlines()) >= second // 30
    view.close()
    assert len(lines().splitlines()) <= 120 // 20, "a log file is not flooded"
    assert lines().splitlines()[0].startswith(f"  {phase or 'working'}: 25 s")


def test_the_plain_view_prints_by_itself_while_a_phase_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "QUIET_SECONDS", 0.05)
    view = PlainView(console(terminal=False))
    with view.phase("load"):
        until(lambda: view.console.file.getvalue().count("load: ") >= 3)
    view.close()
    said = view.console.file.getvalue()
    time.sleep(0.2)
    assert view.console.file.getvalue() == said, "nothing is printed after the end"


def test_a_run_tells_how_far_its_evaluation_is(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "QUIET_SECONDS", 0.01)
    ended = command("embodied.yaml", "runner.max_steps=1", "env.evaluation.episodes=400")
    assert ended.code == 0, ended.err
    assert re.search(r"^  validate: \d+ steps, \d+ of 400 episodes, \d s$", ended.out, re.MULTILINE)


def test_closed_output_ends_the_heartbeat_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain, "QUIET_SECONDS", 0.01)
    view = PlainView(console(terminal=False))
    view.console.file.close()
    with view.phase("load"):
        assert view._thread is not None
        view._thread.join(60)
        assert not view._thread.is_alive()
    view.close()
    assert capsys.readouterr().err == ""


def test_the_live_view_shows_the_clock_of_a_phase_without_progress(view: LiveView) -> None:
    with view.phase("load"):
        first = screen(view)
        time.sleep(0.2)
        assert screen(view) != first


def test_plain_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(terminal_view(console()), LiveView)
    view = terminal_view(console(width=40, terminal=False))
    assert isinstance(view, PlainView)
    view.start(info(tmp_path))
    view.step(9, METRICS["reasoning"])
    view.step(10, METRICS["reasoning"] | {"reward/mean": -0.125})
    with view.phase("generate"):
        view.progress(2, 64, "responses", speed=7.0)
        view.beat()  # too early to say something
        monkeypatch.setattr(plain, "QUIET_SECONDS", 0.0)
        view.beat()
    view.note("saved")
    view.close()
    text = view.console.file.getvalue()
    lines = text.splitlines()
    assert "\x1b" not in text
    assert "policy loss: clip [0.8, 1.28] dual 3.0" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2
    assert steps[0].startswith("step  9/12  reward   0.530  val acc   0.420")
    assert steps[0].index("KL") == steps[1].index("KL")
    assert [line for line in lines if "responses" in line] == ["  generate: 2 of 64 responses, 0 s, 7.000 speed"]
    assert "saved" in lines
    assert any(line.startswith("outputs: ") for line in lines)


def test_snapshot_of_a_finished_run(tmp_path: Path, tool) -> None:
    run = tmp_path / "my_run"
    assert tool("snapshot", run).code == 2
    log = RunLog(run)
    log.start(info(run))
    for step in (1, 2):
        log.step(step, METRICS["reasoning"])
    log.samples(2, [Sample("1+1?", "two", 1.0)])
    log.close()
    assert tool("snapshot", run, "-o", tmp_path / "view.svg").code == 0
    svg = (tmp_path / "view.svg").read_text()
    assert svg.startswith("<svg")
    assert all(part in svg for part in ("my_run", "0.420", "1,203", "two"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (1.0, "1.000"), (41.66, "41.7"), (1203.4, "1,203"), (-0.5, "-0.500"), (0.00123, "0.0012"),
        (0.0000123, "1.2e-05"), (2.5e9, "2.5e+09"), (math.nan, "–"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.44, "8.4 s"), (403, "6:43"), (7603.2, "2:06:43"), (3599.9, "1:00:00"), (math.nan, "–")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3.0, 3.0], 9) == "▁▁"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""
    assert sparkline([0, 7], 2, ascii_only=True) == "_#"


def test_printable() -> None:
    assert printable(" a\nb\x1b[0m\x07 ") == "a⏎b·[0m·"


NARROWED = """
import fcntl, os, struct, termios, time
from pathlib import Path
from rich.console import Console
from rl_platform.launch.views.live_view import LiveView
from rl_platform.reporter import RunInfo

def resize(columns):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

resize(100)
view = LiveView(Console(force_terminal=True, legacy_windows=False))
view.start(RunInfo("my_run", "reasoning", Path("runs/" + "x" * 60), 12, "configs/x.yaml", None, [], ""))
for columns in (30, 60, 17):
    time.sleep(0.6)
    with view._live._lock:  # nothing is drawn between the two
        os.write(1, b"\\x1b]%d\\x07" % columns)  # tells the test's terminal
        resize(columns)
    view.note(f"narrowed to {columns}")
time.sleep(0.6)
view.close()
"""


def rows_on_screen(output: str, columns: int) -> list[str]:
    """The rows of a terminal that wraps long rows when it is narrowed, as most do. OSC n: the new width."""
    rows, column = [""], 0
    below = 0  # rows under the cursor
    for match in re.finditer(r"\x1b\](\d+)\x07|\x1b\[\??([\d;]*)([a-zA-Z])|([\r\n])|([^\x1b\r\n]+)", output):
        width, number, command, control, text = match.groups()
        row = len(rows) - 1 - below
        if width:
            columns = int(width)
            rows = [part for row in rows for part in re.findall(f".{{1,{columns}}}", row) or [""]]
        elif control == "\r":
            column = 0
        elif control == "\n":
            below -= 1
            if below < 0:
                rows, below = [*rows, ""], 0
        elif command == "A":
            below = min(below + int(number or 1), len(rows) - 1)
        elif command == "K":
            rows[row] = ""
        elif text:
            assert len(text) + column <= columns
            rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
            column += len(text)
    return rows


def test_a_narrowed_terminal_shows_no_line_twice() -> None:
    master, slave = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm"
    with subprocess.Popen([sys.executable, "-c", NARROWED], stdout=slave, env=environment) as process:
        os.close(slave)
        parts = []
        with suppress(OSError):  # the end of a pseudo-terminal
            while part := os.read(master, 65536):
                parts.append(part)
    os.close(master)
    assert process.returncode == 0
    rows = rows_on_screen(b"".join(parts).decode(), 100)
    assert [row for row in rows if row.startswith("my_run")] == ["my_run  configs…"], rows
    assert sum(row.startswith("step") for row in rows) == 1, rows


@pytest.mark.parametrize(
    ("runner", "algorithm", "last"),
    [
        ({"max_steps": 100}, {}, 100),
        ({"max_steps": 100, "max_epochs": 2}, {}, 5),  # 18 prompts, 4 in a step
        ({"max_steps": 3, "max_epochs": 2}, {}, 3),
        ({"max_steps": 100, "max_epochs": 2}, {"dynamic_sampling": {}, "group_size": 2}, 100),
    ],
)
def test_the_last_step_is_that_of_the_epochs_if_it_comes_first(runner: Any, algorithm: Any, last: int) -> None:
    placement = {"component_placement": {"actor,rollout,reward": "all"}}
    config = Config(
        runner={"task_type": "reasoning", **runner},
        cluster=placement,
        data={"train_batch_size": 4},
        algorithm=algorithm,
    )
    assert last_step(config, Split([Question(str(number), "") for number in range(9)], [])) == last
