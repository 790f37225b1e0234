"""`rl-platform record` keeps one PPO step of a finished run; `rl-platform replay` repeats its numbers to the bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from rl_platform.engines.rollout.decoder import _Layer
from rl_platform.interrupts import Interrupted
from rl_platform.launch.replay.recorded_step import RecordedPPO
from rl_platform.launch.replay.replayed_step import Difference, compare

RUN = ("runner.max_steps=4", "runner.save_interval=2", "runner.output_dir=out")
RECORDED = Path("out/recordings/step-4")


@pytest.fixture
def recorded(command, tool, folder: Path):
    """recorded("reasoning.yaml", "key=value"): makes a run, records its step 4 and returns what that printed."""

    def record(*arguments: str) -> str:
        assert command(*arguments, *RUN).code == 0
        before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
        ended = tool("record", "out", "--step", "4")
        assert ended.code == 0, ended.err
        assert {path: path.read_bytes() for path in before} == before, "the run's own files"
        assert "metrics of the step equal those of the run" in ended.out
        return str(ended.out)

    return record


REFERENCE = (
    "algorithm={use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.1}}",
    "cluster.component_placement={'actor,critic,reference,rollout,reward': all}",
)


def test_a_step_of_a_language_model_repeats_whole_and_by_phase(recorded, tool) -> None:
    recorded("reasoning.yaml", *REFERENCE)
    whole = tool("replay", RECORDED)
    assert whole.code == 0, whole.err
    assert "all numbers are equal" in whole.out
    for phase in ("reference", "log-probs", "values", "advantages", "critic", "actor"):
        part = tool("replay", RECORDED, "--phase", phase)
        assert part.code == 0, (phase, part.err)
        assert "all numbers are equal" in part.out


def test_a_step_of_an_estimator_without_returns_repeats(recorded, tool) -> None:
    places = "cluster.component_placement={'actor,rollout,reward': all}"
    recorded("reasoning.yaml", "algorithm={adv_type: grpo, group_size: 2}", "~critic", places)
    whole = tool("replay", RECORDED)
    assert whole.code == 0, whole.err
    assert "all numbers are equal" in whole.out


def test_a_step_of_an_embodied_policy_repeats(recorded, tool) -> None:
    recorded("embodied.yaml")
    whole = tool("replay", RECORDED)
    assert whole.code == 0, whole.err
    assert "all numbers are equal" in whole.out
    shown = tool("report", RECORDED, "-o", "report.html")
    assert shown.code == 0, shown.err
    assert "reward/mean" in Path("report.html").read_text()
    refused = tool("replay", RECORDED, "--phase", "reference")
    assert refused.code == 2
    assert "allowed: log-probs, values, advantages, actor" in refused.err


def test_a_step_after_a_checkpoint_and_several_ranks(command, tool, joins: str) -> None:
    ranks = "cluster={devices_per_node: 2, component_placement: {'actor,critic': 0-1, 'rollout,reward': 0}}"
    assert command("reasoning.yaml", *RUN, ranks, joins).code == 0
    assert "metrics of the step equal those of the run" in tool("record", "out", "--step", "3").out
    exact = tool("replay", "out/recordings/step-3")
    near = tool("replay", "out/recordings/step-3", "--tolerance", "1e-4")
    assert (exact.code, near.code) == (1, 0), "one rank sums in another order"
    assert "all differences are at most 0.0001" in near.out


def test_the_first_number_that_differs_is_named(recorded, tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect is in the advantages: what is computed before them is equal."""
    recorded("reasoning.yaml")
    estimate = RecordedPPO._estimate

    def planted(self, batch):
        batch = estimate(self, batch)
        batch.advantages[0, 0] += 0.25
        return batch

    monkeypatch.setattr(RecordedPPO, "_estimate", planted)
    ended = tool("replay", RECORDED)
    assert ended.code == 1
    assert "advantages: advantages[0, 0]: recorded" in ended.err
    assert "(difference 0.25)" in ended.err
    for phase in ("log-probs", "values"):
        assert any(line.split() == [phase, "1", "tensors", "equal"] for line in ended.out.splitlines()), ended.out
    assert tool("replay", RECORDED, "--tolerance", "1e9").code == 0


def test_an_interrupted_recording_leaves_nothing_and_says_so(command, tool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("embodied.yaml", *RUN).code == 0
    update = RecordedPPO.update

    def interrupted(self, batch, step):
        update(self, batch, step)
        raise Interrupted(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RecordedPPO, "update", interrupted)
        patch.setattr(os, "_exit", sys.exit)  # an interrupted command leaves its process, which is that of the tests
        ended = tool("record", "out", "--step", "4")
    assert ended.code == 128 + signal.SIGINT
    assert "nothing was recorded; the same command begins again" in ended.err
    assert "runner." not in ended.err
    assert not RECORDED.exists()
    assert tool("record", "out", "--step", "4").code == 0


FAILURES = {
    "an estimator": (
        "algorithm.adv_type=late.py:broken",
        "algorithm.adv_type: returned advantages that are not finite",
    ),
    "a learning rate": ("actor.optim.lr=1e30", "first number that is not finite: train actor, mini-batch"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_step_that_failed_is_recorded_as_it_failed(command, tool, folder: Path, name: str) -> None:
    override, text = FAILURES[name]
    (folder / "late.py").write_text("def broken(batch, algorithm): return batch.rewards / 0, batch.rewards\n")
    assert command("embodied.yaml", override, *RUN).code != 0
    recording = tool("record", "out", "--step", "1")
    assert recording.code == 0, recording.err
    assert "step 1 failed as it was recorded" in recording.out
    moved = (folder / "out/recordings/step-1").rename(folder / "elsewhere")
    before = sorted(moved.rglob("*"))
    replayed = tool("replay", "elsewhere")
    assert replayed.code == 0, replayed.err
    assert sorted(moved.rglob("*")) == before, "a replay writes nothing into the recording"
    assert "the recorded step failed: " in replayed.out
    assert text in replayed.out


def test_the_layer_in_which_the_engines_part_is_named(recorded, tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect is in the second layer of generation, as a changed kernel would be."""
    recorded("reasoning.yaml", "actor.model.random_init.num_layers=3")
    ended = tool("replay", RECORDED)
    assert ended.code == 0, ended.err
    assert "no layer adds more than rounding" in ended.out
    run = _Layer.__call__

    def planted(self, *arguments):
        output = run(self, *arguments)
        return output * 1.01 if self.number == 1 else output

    monkeypatch.setattr(_Layer, "__call__", planted)
    ended = tool("replay", RECORDED, "--phase", "log-probs")
    assert ended.code == 0, ended.err
    assert "the engines part in layer 2" in ended.out


def test_a_difference_of_other_weights_is_no_difference_of_layers(recorded, tool) -> None:
    recorded("reasoning.yaml", "runner.max_staleness=2", "algorithm.rollout_is={}", "algorithm.entropy_bonus=0.5")
    ended = tool("replay", RECORDED)
    assert ended.code == 0, ended.err
    shown = dict(re.findall(r"^ *(\S.*?):? +(\d+) tokens   mean", ended.out, re.MULTILINE))
    counts = {name: int(count) for name, count in shown.items()}
    total = counts.pop("log-probs of rollout and trainer")
    positions = {name for name in counts if name.startswith("position")}
    assert sum(counts[name] for name in positions) == sum(counts[name] for name in counts.keys() - positions) == total
    assert counts["position 1"] == 8
    assert "no layer adds more than rounding" in ended.out
    assert "such as other weights, which are older with runner.max_staleness" in ended.out


LATE = """
from rl_platform.algorithms.advantages import estimator

def late(batch, algorithm):
    advantages, returns = estimator("gae")(batch, algorithm)
    with open("calls", "a") as calls:
        calls.write("x")
    if len(open("calls").read()) == 3:
        advantages[:] = LAST
    return advantages, returns
"""


@pytest.mark.parametrize(
    ("config", "save_interval"),
    [
        pytest.param("reasoning.yaml", 0, id="reasoning, models of now"),
        pytest.param("reasoning.yaml", 2, id="reasoning, checkpoint", marks=pytest.mark.release),
        pytest.param("embodied.yaml", 0, id="embodied, models of now", marks=pytest.mark.release),
        pytest.param("embodied.yaml", 2, id="embodied, checkpoint"),
    ],
)
def test_a_step_that_fails_leaves_its_record(command, tool, folder: Path, config: str, save_interval: int) -> None:
    (folder / "late.py").write_text(LATE.replace("LAST", "float('inf')"))
    run = (config, "algorithm.adv_type=late.py:late", *RUN, f"runner.save_interval={save_interval}")
    ended = command(*run)
    assert ended.code == 2
    (line,) = [line.strip() for line in ended.err.splitlines() if "the step is recorded" in line]
    recording = line.removeprefix("the step is recorded: rl-platform replay ")
    assert Path(recording) == folder / "out/recordings/failed"
    (folder / "calls").write_text("xx")
    replayed = tool("replay", recording)
    assert replayed.code == 0, replayed.err
    assert "step 3 of" in replayed.out
    assert "algorithm.adv_type: returned advantages that are not finite" in replayed.out
    (folder / "calls").unlink()
    shutil.rmtree(folder / "out")
    assert command(*run, "runner.record_failure=false").code == 2
    assert not Path("out/recordings").exists()


def test_a_step_that_changed_the_critic_before_it_failed(command, tool, folder: Path) -> None:
    """What is left is the actor, whose gradients were never finite, and a command that records the step whole."""
    (folder / "late.py").write_text(LATE.replace("LAST", "3e38"))
    ended = command(
        "reasoning.yaml", "algorithm.adv_type=late.py:late", "algorithm.normalize_advantages=false", *RUN[:1], *RUN[2:]
    )
    assert ended.code == 70
    assert "3 optimizer steps in a row had a non-finite gradient" in ended.err
    assert f"rl-platform record {folder}/out --step 3 --from-start" in ended.err
    whole = tool("replay", "out/recordings/failed")
    assert whole.code == 2
    assert "first number that is not finite: train actor, mini-batch 1" in whole.out
    assert "the step had changed the critic before it failed" in whole.err
    assert "allowed: log-probs, advantages, actor" in whole.err
    assert tool("replay", "out/recordings/failed", "--phase", "actor").code == 0
    (folder / "calls").unlink()
    assert tool("record", "out", "--step", "3", "--from-start").code == 0
    (folder / "calls").write_text("xx")
    again = tool("replay", "out/recordings/step-3")
    assert again.code == 0, again.err


def test_a_step_that_cannot_be_recorded_is_refused(command, tool) -> None:
    assert command("embodied.yaml", *RUN).code == 0
    for step, texts in (
        ("0", ("the run has no such step", "1 to 4")),
        ("5", ("1 to 4",)),
        ("2", ("no checkpoint before step 2", "--from-start")),
    ):
        refused = tool("record", "out", "--step", step)
        assert refused.code == 2
        assert [text for text in texts if text not in refused.err] == []
        assert not Path("out/recordings").exists()


def test_a_recording_that_did_not_reach_its_step_is_removed(command, tool, folder: Path) -> None:
    (folder / "fails.py").write_text("import os\ndef often(step, metrics):\n    os.stat('allowed')\n")
    (folder / "allowed").touch()
    assert command("embodied.yaml", *RUN, "runner.callbacks=[fails.py:often]").code == 0
    (folder / "allowed").unlink()
    ended = tool("record", "out", "--step", "4")
    assert ended.code == 70, ended.err
    assert "FileNotFoundError" in ended.err
    assert not RECORDED.exists()
    (folder / "allowed").touch()
    assert tool("record", "out", "--step", "4").code == 0


def test_a_run_that_deletes_the_checkpoint_it_was_recorded_from(command, tool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of the run have lines of a power loss, and the folder of the recording has a space in its name."""
    assert command("embodied.yaml", *RUN).code == 0
    assert command("embodied.yaml", "runner.max_steps=3", "runner.save_interval=1").code == 0
    Path("out/metrics.jsonl").write_bytes(b'{"step": 3, "reward/mean": 1e9}\n\xff\xfe\n[]\n"x"\n' + b"[" * 10**5)
    update = RecordedPPO.update

    def deleted_meanwhile(self, batch, step):
        shutil.rmtree("out/checkpoints/step-00000002")
        return update(self, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(RecordedPPO, "update", deleted_meanwhile)
        ended = tool("record", "out", "--step", "3", "-o", "my recording")
    assert ended.code == 0, ended.err
    folder = Path("my recording").absolute()
    assert f"rl-platform replay '{folder}'\n" in ended.out
    assert tool("replay", "my recording").code == 0


def test_a_damaged_checkpoint_before_the_step(command, tool) -> None:
    assert command("embodied.yaml", *RUN).code == 0
    Path("out/checkpoints/step-00000002/env.pt").unlink()
    ended = tool("record", "out", "--step", "3")
    assert ended.code == 65
    assert "env.pt: No such file" in ended.err
    assert "nothing was recorded; --from-start records it without that checkpoint" in ended.err
    assert not Path("out/recordings/step-3").exists()
    assert tool("record", "out", "--step", "3", "--from-start").code == 0


def test_a_folder_beside_or_around_a_recording_is_told_which_to_name(recorded, tool) -> None:
    recorded("embodied.yaml")
    copy = RECORDED / "recorded" / "step-00000004"
    shutil.copytree(copy, copy.with_name("step-00000001 copy"))
    for given in (".", "out", "out/recordings", RECORDED / "recorded", copy):
        ended = tool("replay", given)
        place = RECORDED if given in ("out", "out/recordings") else RECORDED.absolute()
        hint = "rl-platform record RUN" if given == "." else f"rl-platform replay {place}"
        assert (ended.code, hint in ended.err) == (2, True), ended.err
    assert tool("replay", RECORDED).code == 0
    Path("elsewhere").symlink_to("nowhere")
    for taken, message in (("elsewhere", "--output: exists"), ("embodied.yaml/x", "embodied.yaml is a file")):
        ended = tool("record", "out", "--step", "4", "-o", taken)
        assert (ended.code, message in ended.err) == (2, True), ended.err


def test_a_damaged_recording_is_refused(recorded, tool) -> None:
    recorded("embodied.yaml")
    assert tool("record", "out", "--step", "4").code == 2, "an existing recording stays"
    for path in (RECORDED / "recorded").rglob("*.pt"):
        path.write_bytes(path.read_bytes()[:-9])
    refused = tool("replay", RECORDED)
    assert refused.code == 2
    assert "record the step again" in refused.err
    assert "Traceback" not in refused.err


def test_comparison_finds_shapes_nan_and_the_largest_difference() -> None:
    nan, one = torch.tensor([1.0, float("nan")]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert list(compare("p", {"x": nan}, {"x": nan.clone()})) == []
    (found,) = compare("p", {"x": one}, {"x": one + torch.tensor([[0.0, 0.5], [0.0, -1.0]])})
    assert (found.largest, found.at) == (1.0, "[1, 1]")
    (missing,) = compare("p", {"x": one}, {})
    (shape,) = compare("p", {"x": one}, {"x": one[0]})
    (lost,) = compare("p", {"x": nan}, {"x": torch.ones(2)})
    assert missing.largest == shape.largest == lost.largest == float("inf")
    assert isinstance(found, Difference)
