"""`--eval`: which checkpoint, what it refuses, and that what it measures is the policy that was saved."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_platform.checkpoint.verify import FORMAT, Checkpoint, seal
from rl_platform.config.schema import Config
from rl_platform.launch.saved.evaluation import files_of, table
from rl_platform.launch.saved.loaded_policy import load_policy
from rl_platform.launch.saved.saved_run import SavedRun
from rl_platform.metrics import read_metrics
from rl_platform.run_files import MANIFEST

RUN = "runner.output_dir=runs/one", "runner.save_interval=2"


@pytest.fixture
def trained(command, folder: Path) -> Path:
    """An embodied run of four steps with checkpoints of steps 2 and 4."""
    assert command("embodied.yaml", *RUN).code == 0
    return folder / "runs" / "one"


def rows(run: Path, step: int = 4) -> list[dict]:
    return json.loads((run / "evaluation" / f"step-{step:08d}.json").read_text())["rows"]


def test_an_embodied_checkpoint(command, trained: Path):
    before = {path: path.stat().st_mtime for path in trained.rglob("*")}
    ended = command("--eval", "latest", "env.evaluation.video=false")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[2].split() == [
        *("task", "actions", "episodes", "invalid", "return", "min", "max", "length")
    ]
    deterministic, sampled = rows(trained)
    assert (deterministic["actions"], sampled["actions"]) == ("deterministic", "sampled")
    last = read_metrics(trained)[-1]
    for name, metric in (("return_mean", "return"), ("return_std", "return_std"), ("length", "length")):
        assert deterministic[name] == pytest.approx(last[f"val/{metric}"])  # what training itself measured
    assert sampled["returns"] != deterministic["returns"]
    assert all(path.stat().st_mtime == changed for path, changed in before.items() if path.is_file())
    assert not list(trained.rglob("*.mp4"))
    again = command("--eval", trained / "checkpoints" / "step-00000004", "env.evaluation.video=false")
    assert again.out == ended.out
    assert rows(trained) == [deterministic, sampled]


def test_another_checkpoint_more_episodes_and_other_seeds(command, trained: Path):
    options = [f"env.evaluation.{option}" for option in ("episodes=5", "seed=77", "video=false")]
    assert command("--eval", trained / "checkpoints" / "step-00000002", *options, "env.num_workers=2").code == 0
    first, _ = rows(trained, 2)
    assert len(first["returns"]) == 5
    assert command("--eval", trained, *options).code == 0
    assert rows(trained, 4)[0]["returns"] != first["returns"]


def test_videos_of_both_ways_to_act_or_a_word_why_not(command, trained: Path):
    ended = command("--eval", trained, "env.max_episode_steps=5")
    assert ended.code == 0, ended.err
    videos = [row["video"] for row in rows(trained)]
    assert ("no video" in ended.out) == (None in videos)
    assert (f"videos: {', '.join(filter(None, videos))}" in ended.out) == any(videos)
    for video in filter(None, videos):
        assert b"ftyp" in Path(video).read_bytes()[:16]


def test_without_a_way_to_draw_it_goes_on(command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert command("embodied.yaml", *RUN, "env.id=InvertedPendulum-v5").code == 0
    monkeypatch.setenv("MUJOCO_GL", "no-such-library")
    ended = command("--eval", "runs/one")
    assert ended.code == 0, ended.err
    assert "no-such-library" in ended.out
    assert [row["video"] for row in rows(folder / "runs" / "one")] == [None, None]


def test_demonstrations_may_be_gone(command, folder: Path):
    h5py = pytest.importorskip("h5py", reason="pip install 'rl-platform[demonstrations]'")
    with h5py.File("demos.hdf5", "w") as file:
        group = file.create_group("data/demo_0")
        group["actions"], group["obs/state"] = np.arange(32) % 2, np.random.default_rng(0).normal(size=(32, 4))
    warm = "runner.warm_start={demonstrations: demos.hdf5, updates: 2, mini_batch_size: 8, nll_coef: 0.1}"
    ended = command("embodied.yaml", *RUN, warm, "runner.max_steps=2", "env.normalize_observations=true")
    assert ended.code == 0, ended.err
    assert command("--eval", "latest", "env.evaluation.video=false").code == 0
    before, action = rows(folder / "runs" / "one", 2), load_policy("runs/one").act(np.ones(4))
    (folder / "demos.hdf5").unlink()
    ended = command("--eval", "latest", "env.evaluation.video=false")
    assert ended.code == 0, ended.err
    assert rows(folder / "runs" / "one", 2) == before
    assert load_policy("runs/one").act(np.ones(4)) == action


def test_a_reasoning_checkpoint(command, folder: Path, scored: str):
    assert command("reasoning.yaml", *RUN, scored, "algorithm.use_kl_loss=true", *WITH_REFERENCE).code == 0
    run = folder / "runs" / "one"
    ended = command("--eval", run)
    assert ended.code == 0, ended.err
    greedy, sampled = rows(run)
    assert greedy["score"] == pytest.approx(read_metrics(run)[-1]["val/score"])
    assert (greedy["tokens"], sampled["tokens"], greedy["questions"]) == ("greedy", "sampled", 8)
    texts = [[json.loads(line) for line in Path(row["answers"]).read_text().splitlines()] for row in (greedy, sampled)]
    assert texts[0] != texts[1]
    assert sampled["score"] == pytest.approx(sum(answer["score"] for answer in texts[1]) / 8)
    assert "greedy" in ended.out
    assert f"answers: {greedy['answers']}, {sampled['answers']}" in ended.out


def test_each_file_is_named_once() -> None:
    rows = [{"task": task, "answers": f"{tokens}.jsonl"} for tokens in ("greedy", "sampled") for task in "abc"]
    assert files_of(rows) == ["answers: greedy.jsonl, sampled.jsonl"]
    assert files_of([{"task": "a", "video": None}]) == []


WITH_REFERENCE = (
    "cluster.component_placement={'actor,critic,rollout,reward,reference': all}",
    "algorithm.kl_loss_coef=0.1",
)


REFUSED = [
    (["runs/on"], "did you mean"),
    (["embodied.yaml"], "is a file, not the folder of a run or a checkpoint"),
    (["."], "contains neither a run nor a checkpoint"),
    (["new"], "has not written a checkpoint yet"),
    (["moved/step-00000004"], "config.yaml is missing"),
    (["runs/one", "algorithm.gamma=0.9"], "algorithm.gamma: belongs to the model or its training"),
    (["runs/one", "env.evaluation.deterministic=true"], "env.evaluation.deterministic: belongs to"),
    (["runs/one", "env.evaluation.episodes=0"], "env.evaluation.episodes: out of range"),
    (["runs/one", "env.id=CartPoll-v1"], "did you mean CartPole-v1"),
    (["runs/one", "reward.type=exact_match"], "reward.type: has no effect: "),
    (["runs/one", "env.evaluation.episods=2"], "did you mean env.evaluation.episodes?"),
    (["runs/one", "--check"], "--eval takes a checkpoint"),
]


def test_what_is_refused(command, folder: Path):
    ended = command("--eval", "latest")
    assert (ended.code, "no run in" in ended.err) == (2, True)
    assert command("embodied.yaml", *RUN, "runner.max_steps=1").code == 0
    (folder / "new").mkdir()
    shutil.copy(folder / "runs" / "one" / "config.yaml", folder / "new")
    shutil.copytree(folder / "runs" / "one" / "checkpoints" / "step-00000001", folder / "moved" / "step-00000004")
    for arguments, message in REFUSED:
        ended = command("--eval", *arguments)
        assert ended.code == 2, arguments
        assert message in ended.err
        assert "Traceback" not in ended.err


def test_a_checkpoint_that_is_gone_and_what_to_type_instead(command, trained: Path):
    checkpoints = trained / "checkpoints"
    for gone in (checkpoints / "step-00000003", checkpoints / "step-3"):
        ended = command("--eval", gone)
        assert ended.code == 2
        assert "--eval: no such checkpoint" in ended.err
        assert (
            f"hint: the run has checkpoints of the steps 2, 4 (runner.keep_checkpoints), as {checkpoints}" in ended.err
        )
        assert "step-00000004" in ended.err
    (checkpoints / "step-00000002" / MANIFEST).unlink()
    ended = command("--eval", checkpoints / "step-00000002")
    assert (ended.code, f"this checkpoint is incomplete: it has no {MANIFEST}" in ended.err) == (2, True)
    assert "checkpoints of the steps 4 (" in ended.err
    (trained.parent / "other").mkdir()
    for given in ("runs", "runs/other", "nothing_like_it"):
        ended = command("--eval", given)
        assert (ended.code, "runs: runs/one" in ended.err or f"runs: {trained}" in ended.err) == (2, True), ended.err
    (checkpoints / "step-00000004" / "env.pt").unlink()
    ended = command("--eval", trained)
    assert (ended.code, "env.pt: No such file" in ended.err) == (65, True)
    again = f"platform-launch {trained}/config.yaml runner.output_dir=ANOTHER trains anew"
    assert again in ended.err
    (checkpoints / "step-00000002" / MANIFEST).touch()
    assert f"name another checkpoint of the run: {checkpoints / 'step-00000002'}" in command("--eval", trained).err
    for gone, given in ((checkpoints / "step-00000004", "step-00000004"), (checkpoints, ""), (checkpoints, "step-4")):
        shutil.rmtree(gone)
        (checkpoints / "step-00000002" / MANIFEST).unlink(missing_ok=True)
        ended = command("--eval", checkpoints / given)
        assert (ended.code, "the checkpoints of this run were deleted" in ended.err) == (2, True), ended.err
        assert f"rl_platform.load_policy('{trained}/model') reads what it has trained; {again}" in ended.err
        checkpoints.mkdir(exist_ok=True)
    shutil.rmtree(trained / "model")
    ended = command("--eval", trained)
    assert f"A run that was stopped begins again: platform-launch {trained}/config.yaml" in ended.err


def test_a_full_disk_keeps_the_earlier_evaluation(command, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> int:
        path.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    evaluate = ("--eval", trained, "env.evaluation.video=false")
    assert command(*evaluate).code == 0
    before = {path: path.read_bytes() for path in (trained / "evaluation").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        ended = command(*evaluate)
    numbers = trained / "evaluation" / "step-00000004.json"
    assert (ended.code, f"{numbers} cannot be written: No space left on device" in ended.err) == (65, True), ended.err
    assert {path: path.read_bytes() for path in (trained / "evaluation").iterdir()} == before
    with monkeypatch.context() as patch:
        patch.setattr("rl_platform.launch.saved.evaluation.unwritable", lambda folder: f"{folder} is not writable")
        ended = command(*evaluate)
    assert (ended.code, f"--eval: {trained}/evaluation is not writable" in ended.err) == (2, True), ended.err
    assert "most likely actions" not in ended.out, "it is said before the episodes"


def test_a_copy_beside_a_checkpoint_is_none(command, trained: Path) -> None:
    newest = trained / "checkpoints" / "step-00000004"
    for name in ("step-00000004.bak", "step-00000004 copy", "step-4_old", "step-9"):
        shutil.copytree(newest, newest.with_name(name))
    for given in ("latest", trained):
        ended = command("--eval", given, "env.evaluation.video=false")
        assert (ended.code, f"checkpoint of step 4: {newest}\n" in ended.out) == (0, True), ended.err
    ended = command("--eval", newest.with_name("step-9"))
    assert (ended.code, "the right name is step-00000004" in ended.err) == (65, True)


def test_a_run_that_deletes_its_old_checkpoint_meanwhile(command, trained: Path, monkeypatch: pytest.MonkeyPatch):
    """The newest checkpoint is deleted between its choice and its use; a run that is going on has a newer one then."""
    checkpoints, opened = trained / "checkpoints", SavedRun.open
    hidden = shutil.move(checkpoints / "step-00000004", trained / "later")

    def goes_on(run: SavedRun, config: Config) -> Checkpoint:
        if (checkpoints / "step-00000002").exists():
            shutil.move(hidden, checkpoints / "step-00000004")
            shutil.move(checkpoints / "step-00000002", trained / "earlier")
        return opened(run, config)

    def starts_again() -> None:
        shutil.move(trained / "earlier", checkpoints / "step-00000002")
        shutil.move(checkpoints / "step-00000004", hidden)

    monkeypatch.setattr(SavedRun, "open", goes_on)
    ended = command("--eval", trained, "env.evaluation.video=false")
    assert (ended.code, f"checkpoint of step 4: {checkpoints}" in ended.out) == (0, True), ended.err
    assert rows(trained, 4)
    starts_again()
    assert load_policy(trained).saved.description.step == 4
    starts_again()
    ended = command("--eval", checkpoints / "step-00000002")  # no other one than the one that was named
    assert (ended.code, f"name another checkpoint of the run: {checkpoints}" in ended.err) == (65, True)


def test_a_checkpoint_of_another_version_model_or_with_damage(command, trained: Path):
    manifest = trained / "checkpoints" / "step-00000004" / MANIFEST
    body = json.loads(manifest.read_text())
    del body["sha256"]
    manifest.write_bytes(seal(body | {"format": FORMAT + 1}))
    ended = command("--eval", trained)
    assert ended.code == 2
    assert f"has format {FORMAT + 1}" in ended.err
    manifest.write_bytes(seal(body | {"fingerprint": body["fingerprint"].replace("[16, 16]", "[8]")}))
    ended = command("--eval", trained)
    assert ended.code == 2
    assert "actor.model.hidden_sizes: [8]" in ended.err
    shard = next((manifest.parent / "actor").glob("*.distcp"))
    os.truncate(shard, 10)
    manifest.write_bytes(seal(body))
    ended = command("--eval", trained)
    assert ended.code == 65
    assert "has 10 bytes instead of" in ended.err


def test_an_environment_that_the_policy_does_not_fit(command, trained: Path):
    ended = command("--eval", trained, "env.id=Acrobot-v1")
    assert ended.code == 2
    assert "env.id: the policy of this checkpoint has other observations or actions" in ended.err


def test_the_table_aligns_and_shows_success_where_it_is_said():
    row = {"task": "push", "actions": "sampled", "return_mean": 1234.5, "return_std": 3.25, "success_once": 0.5}
    lines = table([row | {"returns": [1.0]}, row | {"return_mean": None, "return_std": None}]).splitlines()
    assert lines[0].split() == ["task", "actions", "return", "success_once"]
    assert lines[1].split() == ["push", "sampled", "1,234", "±", "3.250", "0.500"]
    assert "–" in lines[2]
    assert len({len(line) for line in lines}) == 1
