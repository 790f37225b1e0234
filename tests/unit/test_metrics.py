"""Reporters time and pass on; the run log writes what an uninterrupted run would have written."""

from __future__ import annotations

import ast
import codecs
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import until

from rl_platform.errors import ConfigError, DataError
from rl_platform.metrics import RunLog, read_metrics
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.reporter import Episode, Reporters, RunInfo, Sample, Token
from rl_platform.runners.watching.utilization import forward_flops
from rl_platform.runtime.peak_memory import memory_peak
from rl_platform.trackers.experiment_log import ExperimentLog


def info(folder: Path, resumed: int | None = None) -> RunInfo:
    return RunInfo("test", "reasoning", folder, max_steps=4, resumed_step=resumed)


class Recorder:
    """A sink that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    @contextmanager
    def phase(self, name: str):
        self.calls.append(("begin", name))
        yield
        self.calls.append(("end", name))

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.items()))


def test_every_sink_gets_every_call(tmp_path: Path) -> None:
    sinks = [Recorder(), Recorder()]
    reporters = Reporters(sinks)
    run = info(tmp_path)
    reporters.start(run)
    with reporters.phase("generate"):
        reporters.progress(1, 2, "responses", speed=3.0)
    reporters.samples(1, [Sample("p", "r", 1.0)])
    reporters.note("hello")
    reporters.close()
    expected = [
        ("start", run),
        ("begin", "generate"),
        ("progress", 1, 2, "responses", ("speed", 3.0)),
        ("end", "generate"),
        ("samples", 1, [Sample("p", "r", 1.0)]),
        ("note", "hello"),
        ("close",),
    ]
    assert sinks[0].calls == sinks[1].calls == expected


def test_notes_hold_no_half_characters_and_have_a_limit(tmp_path: Path) -> None:
    """Errors of an environment are notes: one with the name of a file that is not UTF-8 ended the run."""
    sink, log = Recorder(), tmp_path / "log"
    reporters = Reporters([sink])
    reporters.note("cannot open \udcff.obj · äöü")
    assert sink.calls == [("note", "cannot open \\udcff.obj · äöü")]
    log.write_text(sink.calls[0][1], encoding="utf-8")
    reporters.note("first " + "x" * 10_000_000 + " last")
    shown = sink.calls[1][1]
    assert len(shown) < 21_000
    assert shown.startswith("first xx")
    assert "[... 9,980,011 characters ...]" in shown
    assert shown.endswith("xx last")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """passes(2.0): two seconds pass, and no others."""
    now = [100.0]
    monkeypatch.setattr("rl_platform.reporter.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_phases_add_up_within_a_step_and_rates_are_derived(tmp_path: Path, passes) -> None:
    sink = Recorder()
    reporters = Reporters([sink])
    reporters.start(info(tmp_path))
    for _ in range(2):
        with reporters.phase("update"):
            passes(2.0)
    with pytest.raises(RuntimeError), reporters.phase("score"):
        raise RuntimeError
    passes(1.0)
    reporters.step(1, {"reward/mean": torch.tensor(0.5), "perf/tokens": 100})
    reporters.step(2, {})
    _, _, first = sink.calls[-2]
    assert first["reward/mean"] == 0.5
    assert (first["time/update"], first["time/score"], first["time/step"]) == (4.0, 0.0, 5.0)
    assert first["perf/tokens_per_sec"] == 100 / 5.0
    assert set(sink.calls[-1][2]) == {"time/step"}  # timings start anew with each step


def test_rates_are_of_the_training_step(tmp_path: Path, passes) -> None:
    sink = Recorder()
    reporters = Reporters([sink])
    reporters.start(info(tmp_path))
    for phase, seconds in (("load", 1.0), ("validate", 2.0), ("checkpoint", 3.0), ("export", 4.0), ("collect", 5.0)):
        with reporters.phase(phase):
            passes(seconds)
    reporters.step(1, {"perf/env_steps": 100})
    _, _, found = sink.calls[-1]
    assert (found["time/step"], found["perf/env_steps_per_sec"]) == (15.0, 100 / 5.0)


def test_all_sinks_are_closed_even_if_one_fails() -> None:
    class Failing(Recorder):
        def close(self) -> None:
            raise OSError("disk")

    sinks = [Recorder(), Failing(), Recorder()]
    with pytest.raises(OSError, match="disk"):
        Reporters(sinks).close()
    assert sinks[0].calls == sinks[2].calls == [("close",)]


def test_closing_what_never_started_is_fine(tmp_path: Path) -> None:
    """An error between construction and start must not be hidden by one in close."""
    ExperimentLog(tmp_path / "never", ["tensorboard"]).close()
    assert not (tmp_path / "never").exists()


def write(folder: Path, steps: range, resumed: int | None) -> RunLog:
    log = RunLog(folder)
    log.start(info(folder, resumed))
    for step in steps:
        log.step(step, {"reward/mean": step / 3, "actor/approx_kl": math.inf if step == 3 else 1e-9})
        log.samples(step, [Sample(f"p{step}", "r\n", math.nan if step == 3 else 1.0, "2", "stop")])
    return log


def test_lines_are_flushed_strict_json(tmp_path: Path) -> None:
    log = write(tmp_path, range(4), None)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [0, 1, 2, 3]
    assert json.loads(lines[3]) == {"step": 3, "reward/mean": 1.0, "actor/approx_kl": None}
    assert math.isnan(read_metrics(tmp_path)[3]["actor/approx_kl"])
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    sample = {"prompt": "p1", "response": "r\n", "reward": 1.0, "answer": "2", "finish_reason": "stop"}
    assert samples[1] == {"step": 1, **sample}
    assert samples[3]["reward"] is None
    log.close()


@pytest.mark.parametrize("resumed", [0, 1, 2])
def test_resume_gives_the_file_of_an_uninterrupted_run(tmp_path: Path, resumed: int) -> None:
    write(tmp_path / "whole", range(5), None).close()
    write(tmp_path / "cut", range(4), None).close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / "cut" / name, "a") as file:
            file.write('{"step": 4, "rew')  # killed while writing
    write(tmp_path / "cut", range(resumed + 1, 5), resumed).close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_lost_step_keeps_its_line_without_numbers(tmp_path: Path) -> None:
    """Two lines of a step, lines out of order, a missing end: after a resume there is one line per step."""
    lines = [{"step": 4}, {"step": 1, "reward/mean": 0.5}, {"step": 2}, {"step": 2, "reward/mean": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(tmp_path, range(6, 7), 5).close()
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.get("reward/mean") for row in rows] == [0.5, 1.5, None, None, None, 2.0]


DAMAGED = {
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "a text as step": b'{"step": "1"}',
    "a truth value as step": b'{"step": true}',
    "a negative step": b'{"step": -1}',
    "half a step": b'{"step": 1.5}',
    "infinite": b'{"step": 1, "a": 1e999}',
    "no number": b'{"step": 1, "a": [1]}',
    "beyond floats": b'{"step": 1, "a": 1' + b"0" * 400 + b"}",
    "deep": b"[" * 100_000,
    "zeros": b"\0" * 9,
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_any_damage_is_moved_aside(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, range(1), None).close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(line + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)
    write(tmp_path, range(1, 3), 0).close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / f"{name}.damaged").read_bytes() == line + b"\n"


def test_a_step_without_a_checkpoint_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write(tmp_path, range(1), None)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log.step(1, {})
    assert synced == []
    log.sync()
    assert len(synced) == 3  # metrics, samples, tokens
    log.close()


def test_tokens_and_scores_of_functions_are_flat_lines(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start(info(tmp_path))
    log.samples(1, [Sample("p", "r", 1.5, reward_parts=(("exact", 1.0), ("format", 0.5)))])
    log.tokens(1, [Token(0, "a", log_prob=-1.23456789, advantage=math.nan, return_=2.0, version=7), Token(0, "tool")])
    log.close()
    sample = json.loads((tmp_path / "samples.jsonl").read_text())
    assert (sample["reward"], sample["reward/exact"], sample["reward/format"]) == (1.5, 1.0, 0.5)
    tokens = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert tokens[0] == {"step": 1, "sample": 0, "text": "a", "log_prob": -1.23457, "return": 2.0, "version": 7}
    assert tokens[1] == {"step": 1, "sample": 0, "text": "tool"}
    RunLog(tmp_path).start(info(tmp_path, resumed=0))
    assert (tmp_path / "tokens.jsonl").read_text() == ""  # lines after the checkpoint are cut


def test_a_fresh_run_starts_fresh_files(tmp_path: Path) -> None:
    write(tmp_path, range(4), None).close()
    write(tmp_path, range(2), None).close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]


def test_a_byte_order_mark_of_an_editor_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path, range(3), None).close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = tmp_path / name
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    write(tmp_path, range(2, 4), 1).close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_bytes().startswith(b"{")
        assert not (tmp_path / f"{name}.damaged").exists()


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*No such file"):
        read_metrics(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[]\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_tensorboard_has_steps_before_the_run_ends(tmp_path: Path) -> None:
    """A run that is killed leaves what it logged, but for the last second, though no step waits for the file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = ExperimentLog(tmp_path, ["tensorboard"])
    log.start(info(tmp_path, None))
    for step in range(3):
        log.step(step, {"reward/mean": float(step)})
    events, until = EventAccumulator(str(tmp_path / "tensorboard")), time.monotonic() + 60
    while "reward/mean" not in events.Tags()["scalars"] or len(events.Scalars("reward/mean")) < 3:
        assert time.monotonic() < until
        time.sleep(0.1)
        events.Reload()
    log.close()


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_after_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, resumed in ((range(4), None), (range(2, 5), 1)):
        log = ExperimentLog(tmp_path, ["tensorboard"])
        log.start(info(tmp_path, resumed))
        for step in steps:
            log.step(step, {"reward/mean": step + (100 if resumed else 0), "actor/kl": step / 4 if step else math.nan})
        log.close()
        time.sleep(1.1)  # event files are named and ordered by the second
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 102.0),
        (3, 103.0),
        (4, 104.0),
    ]
    assert [event.value for event in events.Scalars("actor/kl")][1:] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.slow
def test_tensorboard_has_samples_and_a_video(tmp_path: Path) -> None:
    import imageio.v2 as imageio
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pictures = [np.full((48, 64, 3), shade, np.uint8) for shade in range(0, 250, 10)]
    imageio.mimwrite(tmp_path / "evaluation.mp4", pictures, format="FFMPEG", fps=25, macro_block_size=2)  # type: ignore[arg-type]
    log = ExperimentLog(tmp_path, ["tensorboard"])
    log.start(info(tmp_path, None))
    log.samples(2, [Sample("1 + 1 =", "</code>\n**2**", 1.0)])
    log.episodes(2, [Episode(7, return_=3.5, length=9, finish_reason="terminated")])
    log.step(2, {})
    log.video(tmp_path / "evaluation.mp4")
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    first, second = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary"))
    assert "**response**\n\n    </code>\n    **2**" in first
    assert "**return**\n\n    3.5" in second
    (animation,) = events.Images("evaluation")
    assert (animation.step, animation.encoded_image_string[:4]) == (2, b"GIF8")
    assert len(imageio.mimread(animation.encoded_image_string)) == 25


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_an_absent_tracker_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda other, *rest: None if other == name else find(other, *rest))
    with pytest.raises(ConfigError, match=f"pip install {name}") as raised:
        ExperimentLog(tmp_path, [name])
    assert raised.value.exit_code == 2


def track(folder: Path, name: str) -> None:
    """Four steps of a run, and its resumption after step 1."""
    for steps, resumed in ((range(4), None), (range(2, 5), 1)):
        log = ExperimentLog(folder, [name])
        log.start(replace(info(folder, resumed), config={"algorithm": {"gamma": 0.5}}))
        for step in steps:
            log.samples(step, [Sample("question", f"answer {step}", 1.0)])
            log.step(step, {"reward/mean": step + (100.0 if resumed else 0.0)})
        log.close()
        if name == "wandb" and resumed is None:
            time.sleep(1.1)  # its folders are named by the second


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after its header: chunks of (checksum, length, kind), in blocks of 32 KiB."""
    position, parts = 7, b""
    while len(data) - position > 7:
        if (left := -position % 2**15) and left < 7:  # a block has no room for another chunk
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        parts += data[position - length : position]
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_writes_what_a_run_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, with the real package; the resumed part has the id of the first one."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    track(tmp_path, "wandb")

    def logged() -> list[tuple[int, float]]:
        steps = []
        for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):  # named by the time
            assert (tmp_path / "wandb_id").read_text() in file.name
            for data in leveldb_records(file.read_bytes()):
                record = Record()
                record.ParseFromString(data)
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "reward/mean" in values:
                    steps.append((int(values["_step"]), float(values["reward/mean"])))
        return steps

    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (2, 102.0), (3, 103.0), (4, 104.0)]
    until(lambda: len(logged()) == len(expected))  # its process writes the last lines after `finish`
    assert logged() == expected
    tables = [json.loads(file.read_text()) for file in (tmp_path / "wandb").rglob("samples_*.table.json")]
    assert {row[2] for table in tables for row in table["data"]} == {f"answer {step}" for step in range(5)}


def test_trackio_stores_what_a_run_logs(tmp_path: Path) -> None:
    """In a process of its own: the package reads TRACKIO_DIR when it is imported."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    program = """
import sys
from pathlib import Path
from tests.unit.test_metrics import track
track(Path(sys.argv[1]), "trackio")
from trackio.sqlite_storage import SQLiteStorage
name = Path(sys.argv[1], "trackio_id").read_text()
assert SQLiteStorage.get_runs("test") == [name]
rows = [(row["step"], row["reward/mean"]) for row in SQLiteStorage.get_logs("test", name)]
Path(sys.argv[1], "rows").write_text(repr(rows))
"""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "database"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    stored = ast.literal_eval((tmp_path / "rows").read_text())
    assert sorted(stored) == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 102.0), (3, 3.0), (3, 103.0), (4, 104.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = types.ModuleType(name)  # the package as it fails: no server, a full disk
    tracker.__spec__ = importlib.util.spec_from_loader(name, None)
    monkeypatch.setitem(sys.modules, name, tracker)
    tracker.init = lambda **_: 1 / 0  # type: ignore[attr-defined]
    track(tmp_path, name)
    assert "division by zero. The run continues" in caplog.text


def test_utilization() -> None:
    """Two sequences of 2 and 3 tokens, and a Llama whose products are counted by hand."""
    shape = ModelShape(vocabulary=10, hidden=4, layers=1, heads=2, kv_heads=1, head_dim=2, intermediate=5, tied=True)
    # q, o: 4 * 4 each; k, v: 4 * 2 each; gate, up, down: 4 * 5 each; head: 4 * 10
    assert shape.products_per_token == 2 * 16 + 2 * 8 + 3 * 20 + 40
    # attention: scores and values of 1 + 2 and 1 + 2 + 3 pairs, nearly 2^2 / 2 and 3^2 / 2, of width 4
    assert forward_flops(shape, 5, 2**2 + 3**2) == 2 * (5 * 148 + 13 * 4)

    sink = Recorder()
    reporters = Reporters([sink], devices=4, flops=1e3)  # type: ignore[list-item]
    reporters.step(1, {"perf/flops": 8e3, "perf/tokens": 12.0})
    (_, _, metrics) = sink.calls[-1]
    assert metrics["perf/mfu"] == pytest.approx(8e3 / (metrics["time/step"] * 4 * 1e3))
    assert metrics["perf/tokens_per_second_per_gpu"] == pytest.approx(12 / metrics["time/step"] / 4)
    Reporters([sink]).step(1, {"perf/flops": 8e3})  # type: ignore[list-item]
    assert "perf/mfu" not in sink.calls[-1][2]


def test_memory_peak_is_at_least_what_was_used() -> None:
    size = 2**27
    used = bytearray(b"1") * size
    assert memory_peak([]) > len(used)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems report no peak of the program alone")
def test_memory_peak_leaves_out_the_process_that_started_this_one() -> None:
    used = bytearray(b"1") * 2**29
    code = "from rl_platform.runtime.peak_memory import memory_peak; print(memory_peak([]))"
    peak = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(peak) < len(used)
