"""Checkpoints: what goes in comes out, what could not come out is refused, old ones go, foreign ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch
from stand_ins import SilentReporter

from rl_platform.checkpoint.fingerprints import fingerprint_difference
from rl_platform.checkpoint.verify import Checkpoint, Written, seal
from rl_platform.checkpoint.write import CheckpointStore, Shards
from rl_platform.config.schema import Config
from rl_platform.errors import CheckpointError
from rl_platform.run_files import MANIFEST
from rl_platform.runners.run_fingerprint import fingerprint
from rl_platform.runners.state import RunState


def parts(value: float) -> dict[str, dict[str, object]]:
    shared = torch.full((4, 3), value)
    return {
        "actor": {
            "model": OrderedDict(w=shared, tied=shared),
            "adam": {0: {"step": torch.tensor(value)}},
            "lr": [1e-3, None],
        },
        "runner": {
            "step": int(value),
            "name": "run",
            "position": (3, -1),
            "flag": True,
            "blob": b"\x00\xff",
            "big": 2**127,
        },
    }


def test_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, fingerprint="shapes-1")
    saved = store.save(40, parts(4.0))
    found = CheckpointStore(tmp_path / "checkpoints", keep=2, fingerprint="shapes-1").latest()
    assert found == saved
    assert found.step == 40
    assert found.path.name == "step-00000040"
    assert found.parts == {"actor": "actor.pt", "runner": "runner.pt"}
    actor = found.load("actor")
    assert torch.equal(actor["model"]["w"], torch.full((4, 3), 4.0))
    assert actor["model"]["w"].data_ptr() == actor["model"]["tied"].data_ptr()  # tied weights stay tied
    assert actor["adam"][0]["step"] == 4.0
    assert actor["lr"] == [1e-3, None]
    assert found.load("runner") == parts(4.0)["runner"]


def test_empty_folder_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, keep=1).latest() is None


def test_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 30, 100_000_000):
        store.save(step, parts(step))
    assert store.steps() == [30, 100_000_000]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000030", "step-100000000"}


def test_going_back_drops_the_abandoned_future(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (10, 20, 30):
        store.save(step, parts(step))
    store.save(15, parts(15))
    assert store.steps() == [10, 15]
    assert store.latest().step == 15


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(10, parts(1))
    store.save(10, parts(2))
    assert store.latest().load("runner")["step"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (np.float64(1.0), r"env\.norm\[1\]: numpy\.float64"),
        (np.ones(2), r"env\.norm\[1\]: numpy\.ndarray"),
        ({np.int64(1): 2}, r"env\.norm\[1\]: key"),
        (Path("x"), r"env\.norm\[1\]: pathlib"),
        ({1, 2}, r"env\.norm\[1\]: builtins\.set"),
    ],
)
def test_what_could_not_be_loaded_is_refused_with_its_place(tmp_path: Path, value: object, where: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(TypeError, match=where):
        store.save(1, {"env": {"norm": [1.0, value]}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../actor", "", ".hidden", "a/b"])
def test_part_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="part"):
        CheckpointStore(tmp_path, keep=1).save(1, {name: {}})


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep=2, fingerprint="hidden=64").save(1, parts(1)).path
    other = CheckpointStore(tmp_path, keep=2, fingerprint="hidden=128")
    for open_it in (other.latest, lambda: other.open(path)):
        with pytest.raises(CheckpointError, match=r"hidden=64.*hidden=128"):
            open_it()
    assert Checkpoint.open(path).fingerprint == "hidden=64"


def test_a_checkpoint_of_another_version_is_refused_and_not_skipped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, parts(1))
    newest = store.save(2, parts(2)).path / MANIFEST
    body = json.loads(newest.read_bytes())
    del body["sha256"]
    newest.write_bytes(seal(body | {"format": 1}))
    with pytest.raises(CheckpointError, match=r"step-00000002 has format 1 and this version .* reads format 2"):
        store.latest()
    assert store.steps() == [1, 2]


def test_a_room_that_holds_two_checkpoints_is_enough_to_keep_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free at the start is what a run needs: each save finds room beside the checkpoint before it."""
    state = {"w": torch.zeros(10_000)}
    room = 2 * state["w"].nbytes + 10_000  # and a little for the files' own form

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=room - sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    store = CheckpointStore(tmp_path, keep=1)
    store.require_space(state["w"].nbytes)
    for step in range(1, 4):
        store.save(step, {"actor": state})
    assert store.steps() == [3]
    with pytest.raises(CheckpointError, match="not enough disk space"):
        store.save(4, {"actor": {"w": torch.zeros(20_000)}})


def test_a_shard_that_is_not_in_the_folder_was_written_elsewhere(tmp_path: Path) -> None:
    """As on a node with a disk of its own."""
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp was written on another node: all nodes must share"):
        store.save(1, {"actor": Shards(0, lambda folder: {"__1_0.distcp": Written(1, "")})})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_one_although_ranks_still_write_where_it_cleans_up(tmp_path: Path) -> None:
    """What they rename at that moment is gone when it is to be deleted."""
    store = CheckpointStore(tmp_path, keep=1)
    writing = threading.Event()

    def write(folder: Path) -> None:
        with suppress(FileNotFoundError):
            for name in map(str, range(5000)):
                (folder / f"{name}.tmp").touch()
                (folder / f"{name}.tmp").rename(folder / name)
                writing.set()

    def interrupted(folder: Path) -> NoReturn:
        folder.mkdir(exist_ok=True)
        rank = threading.Thread(target=write, args=(folder,))
        ranks.append(rank)
        rank.start()
        writing.wait(60)
        raise KeyboardInterrupt

    for _ in range(5):
        ranks: list[threading.Thread] = []
        with pytest.raises(KeyboardInterrupt):
            store.save(1, {"actor": Shards(0, interrupted)})
        ranks[0].join()
        store = CheckpointStore(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_errors_say_what_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    checkpoint = store.save(1, parts(1))
    with pytest.raises(CheckpointError, match=r"no part 'critic'; it holds: actor, runner"):
        checkpoint.load("critic")
    with pytest.raises(CheckpointError, match=r"name one of its checkpoints: step-00000001"):
        store.open(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        store.open(tmp_path / "nowhere")


def test_code_in_a_file_never_runs(tmp_path: Path) -> None:
    """Even with a manifest that fits: only tensors and plain values are unpickled."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "was-here"),)

    store = CheckpointStore(tmp_path / "store", keep=2)
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    checkpoint = store.save(1, {"actor": {}})
    shutil.copy(tmp_path / "evil.pt", checkpoint.path / "actor.pt")
    with pytest.raises(CheckpointError, match=r"actor\.pt cannot be read"):
        checkpoint.load("actor")
    assert not (tmp_path / "was-here").exists()


def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps only what was synced: each file, then its folder, then (after the rename) the parent."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def traced_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def traced_rename(source: Path, target: Path) -> None:
        events.append(f"rename to {Path(target).name}")
        rename(source, target)

    store = CheckpointStore(tmp_path, keep=2)
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced_rename)
    store.save(7, parts(7))
    stage = ".tmp-step-00000007"
    assert events == ["actor.pt", "runner.pt", MANIFEST, stage, "rename to step-00000007", tmp_path.name]


MISTYPED = [
    ("parts", {"env": "../../../../etc/passwd"}, "none of its files"),
    ("parts", {"env": "/etc/passwd"}, "none of its files"),
    ("parts", {"env": "manifest.json"}, "none of its files"),
    ("parts", {"env": 3}, "none of its files"),
    ("parts", ["env"], "parts is"),
    ("files", {"../x": {"bytes": 1, "sha256": "0"}}, "not inside the checkpoint"),
    ("files", {"/etc/passwd": {"bytes": 1, "sha256": "0"}}, "not inside the checkpoint"),
    ("files", {"env.pt": {"bytes": "1", "sha256": "0"}}, "no size and SHA-256"),
    ("files", {"env.pt": None}, "no size and SHA-256"),
    ("files", None, "files is"),
    ("step", "4", "step is"),
    ("step", True, "step is"),
    ("fingerprint", None, "fingerprint is"),
]


@pytest.mark.parametrize(("key", "value", "message"), MISTYPED)
def test_a_right_seal_does_not_vouch_for_values(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = CheckpointStore(tmp_path, keep=2).save(4, {"env": {"x": 1}}).path
    body = json.loads((path / MANIFEST).read_bytes())
    body.pop("sha256")
    (path / MANIFEST).write_bytes(seal(body | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path)


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path / "run", keep=2).save(4, {"env": {"x": 1}}).path
    (path / "env.pt").rename(tmp_path / "elsewhere.pt")
    (path / "env.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CheckpointError, match=r"env\.pt is a link out of the checkpoint"):
        Checkpoint.open(path)
    (tmp_path / "linked").symlink_to(tmp_path / "run")  # folders above it may be links
    (path / "env.pt").unlink()
    (tmp_path / "elsewhere.pt").rename(path / "env.pt")
    assert Checkpoint.open(tmp_path / "linked" / path.name).load("env") == {"x": 1}


def test_how_to_continue_a_run_without_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    def config(resume: str) -> Config:
        placement = {"component_placement": {"actor,rollout,reward": "all"}}
        return Config(runner={"task_type": "reasoning", "resume": resume}, cluster=placement)

    def outlook(resume: str) -> str:
        return RunState(config(resume), tmp_path / "run", SilentReporter()).outlook()

    store = CheckpointStore(tmp_path, 1, fingerprint(config("auto")))
    other = str(store.save(2, parts(1.0)).path)
    none = "no checkpoint was written yet (runner.save_interval): "
    assert outlook("auto") == f"{none}the same command starts over"
    assert outlook(other) == f"{none}the same command goes on from {other}"
    assert outlook("never") == f"{none}runner.resume=auto starts over"


def test_fingerprints_differ_by_paths_only_where_the_files_are_unknown() -> None:
    here, there, files = 'path: "a"', 'path: "b"', 'files of path: "1f"'
    differ = fingerprint_difference
    assert differ(here, here) is None
    assert differ(here, there) == (here, there)
    assert differ(f"{here}\n{files}", f"{there}\n{files}") is None
    assert differ(f"{here}\n{files}", here) is None
    assert differ(f"{here}\n{files}", there) == (here, there)
    changed = 'files of path: "2e"'
    assert differ(f"{here}\n{files}", f"{here}\n{changed}") == (files, changed)
    assert differ(here, f"{here}\nsize: 3") == ("nothing more", "size: 3")
