"""Whole rehearsals: two steps, a kill and a resume in small, and the mistakes that they find."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, assert_gone

from rl_platform.config import load_config
from rl_platform.engines.rollout.vllm.installation import VERSION

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = "actor.model={path: Qwen/Qwen2.5-1.5B-Instruct, tokenizer: null}"
PLACED = "cluster={devices_per_node: 8, component_placement: {'actor,rollout,reward': 0-7, critic: 0}}"
KL = ["algorithm.use_kl_loss=true", "cluster.component_placement={'actor,critic,rollout,reward,reference': all}"]
NO_ENGINE = f"""\
#!/bin/sh
case "$2" in *importlib.metadata*) echo {VERSION};; *) echo no processor for it; exit 1;; esac
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_rehearsal_reports_and_leaves_only_its_report(command, folder):
    """Its engine says that it is installed, and does not start."""
    (folder / "temporary").mkdir()
    (folder / "python").write_text(NO_ENGINE)
    (folder / "python").chmod(0o755)
    engine = f"rollout={{backend: vllm, vllm: {{python: {folder / 'python'}}}}}"
    ended = command("--rehearse", "reasoning.yaml", "--rehearse-in", "temporary", engine, "runner.output_dir=disk/out")
    assert ended.code == 0, ended.err
    assert "passed in" in ended.out
    reason = "vllm -> torch: vllm does not start on the CPU of this machine, see out-rehearsal.log"
    assert f"  command line: rollout.backend: {reason}\n" in ended.out
    assert "no processor for it" in (folder / "out-rehearsal.log").read_text()
    written = (folder / "reasoning.yaml").read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(written) if "max_steps" in text)
    assert f"\n  reasoning.yaml:{line}: runner.max_steps: 4 -> 2" in ended.out
    assert (folder / "out-rehearsal.txt").read_text() in ended.out
    report = json.loads((folder / "out-rehearsal.json").read_text())
    assert [phase["name"] for phase in report["phases"]][-1] == "resume, second step, export"
    assert not (folder / "disk").exists()  # as the disk of a cluster: the report is in the working folder
    assert not list((folder / "temporary").iterdir())


FUNCTIONS = """\
import torch
from rl_platform.algorithms.advantages import estimator


def text(response, answer, metadata):
    return "good"


def shifted(batch, algorithm):
    advantages, returns = estimator("gae")(batch, algorithm)
    return advantages.roll(1, dims=1), returns
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "code", "named"),
    [
        (["reward.type=mine:text"], 70, ["mine:text", "'good'"]),
        (["algorithm.adv_type=mine:shifted"], 70, ["mine:shifted", "credit: "]),
        (["data.prompt_template=Answer:"], 2, ["data.prompt_template"]),
        ([MODEL, "actor.training_backend=megatron", PLACED, "actor.parallel.tensor=8"], 2, ["actor.parallel", "12"]),
        (
            [MODEL, "rollout={backend: sglang, tensor_parallel_size: 8}"],
            2,
            ["rollout.tensor_parallel_size", "12 heads"],
        ),
        ([MODEL, *KL, "reference.model={path: meta-llama/Llama-3.2-1B}"], 2, ["reference.model", "Llama 3"]),
        (["actor.model={path: some/thing, tokenizer: null}"], 2, ["actor.model.path", "hf download some/thing"]),
        (["actor.model={path: Qwen/Qwen2.5-9B, tokenizer: null}"], 2, ["actor.model.path", "Qwen2.5-9B"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_planted_mistake_is_found_before_the_small_run(command, folder, overrides, code, named):
    (folder / "mine.py").write_text(FUNCTIONS)
    ended = command("--rehearse", "reasoning.yaml", *overrides)
    assert ended.code == code, ended.err
    assert all(text in ended.err for text in named), ended.err
    assert "first step" not in ended.out


def test_a_folder_that_is_not_there_is_refused(command):
    ended = command("--rehearse", "reasoning.yaml", "--rehearse-in", "nowhere")
    assert ended.code == 2
    assert "--rehearse-in" in ended.err


@pytest.mark.release
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_config_can_be_rehearsed(command, path):
    env = load_config(path).config.env
    if env.python is not None or env.id.startswith("simulators.py:"):
        pytest.skip("its simulator is not installed with the tests")
    for named in ("configs/reasoning/towns.jsonl", "examples"):  # of a tool and an agent, for which nothing stands in
        Path(named).parent.mkdir(parents=True, exist_ok=True)
        Path(named).symlink_to(CONFIGS.parent / named)
    ended = command("--rehearse", path)
    assert ended.code == 0, ended.err


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_an_end_by_a_signal_leaves_no_process(start, folder, sent):
    (folder / "temporary").mkdir()
    process = start("--rehearse", "reasoning.yaml", "--rehearse-in", "temporary")
    process.until(lambda: list(folder.glob("temporary/*/run/config.yaml")))
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2  # the run and its guard
    process.send_signal(sent)
    process.wait(HANG_S)
    assert_gone(started)
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert not list((folder / "temporary").iterdir())
