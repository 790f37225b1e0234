"""`--plan` on the command line: its forms, its search, the calibration by a real run; nothing is started."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.usefixtures("unmeasured")
HEAVY = {"torch", "ray", "transformers", "gymnasium"}
CLUSTER = "cluster={inventory: {nodes: 2, gpus_per_node: 4, gpu: h100}, component_placement: {'actor,critic': 0-3, 'rollout,reward': 4-7}}"  # noqa: E501


def test_plan_alone_is_text_wherever_it_stands(command):
    first, last = command("--plan", "reasoning.yaml", CLUSTER), command("reasoning.yaml", CLUSTER, "--plan")
    assert first.code == last.code == 0
    assert first.out == last.out == command("reasoning.yaml", CLUSTER, "--plan=text").out
    for heading in ("Cluster: 2 nodes, 8 GPUs", "Memory in GiB", "One step, estimated for h100", "Batches:"):
        assert heading in first.out


def test_plan_as_json_and_as_a_picture(command):
    tree = json.loads(command("reasoning.yaml", CLUSTER, "--plan=json").out)
    assert [device["ranks"] for device in tree["devices"][3:5]] == [
        {"actor": [3], "critic": [3]},
        {"rollout": [0], "reward": [0]},
    ]
    assert ElementTree.fromstring(command("reasoning.yaml", CLUSTER, "--plan=svg").out).tag.endswith("svg")


def test_plan_of_another_form_is_wrong_usage(command):
    ended = command("reasoning.yaml", "--plan=xml")
    assert ended.code == 2
    assert "'xml' is not one of 'text', 'json', 'svg', 'html', 'search'" in ended.err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("actor.parallel.tensor=3",), "command line: actor.parallel: 4 ranks of actor are no multiple of the"),
        (
            ("actor.parallel.tensor=2",),
            "reasoning.yaml:25: critic.parallel: all models of a process need the same layout",
        ),
        (
            ("actor.parallel.tensor=4", "critic.parallel.tensor=4", "actor.model.random_init.num_heads=2"),
            "command line: actor.parallel.tensor: tensor ranks have equal shares of the model's 2 attention heads",
        ),
        (
            ("actor.parallel.pipeline=4", "critic.parallel.pipeline=4", "actor.model.random_init.num_layers=6"),
            "command line: actor.parallel.pipeline: pipeline stages have equally many of the model's 6 layers",
        ),
        (
            ("actor.parallel.context=2", "critic.parallel.context=2", "actor.model.random_init={num_heads: 1}"),
            "command line: actor.parallel.context: ranks that share tokens divide the model's 1 attention heads",
        ),
        (
            (
                "actor.lora.target_modules=[q_proj, up_proj]",
                "actor.model={path: Qwen/Qwen3-30B-A3B, random_init: null, tokenizer: null}",
            ),
            "command line: actor.lora.target_modules: the model has no linear layer of this name; experts have no",
        ),
        (
            ("cluster.component_placement={'actor,critic,rollout,reward': 0}", "rollout.sync=delta"),
            "command line: rollout.sync: the rollout shares the actor's process and reads its weights where they are",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_no_plan(command, overrides: tuple[str, ...], message: str):
    megatron = ("actor.training_backend=megatron", "critic.training_backend=megatron")
    ended = command("reasoning.yaml", CLUSTER, "--plan", *megatron, *overrides)
    assert ended.code == 2
    assert message in ended.err
    assert ended.out == ""


def test_the_proposed_lines_can_be_pasted(command, folder: Path):
    text = command("reasoning.yaml", CLUSTER, "--plan=search").out
    pasted = yaml.safe_load(text[text.index("\ncluster:") :])
    config = yaml.safe_load((folder / "reasoning.yaml").read_text())
    config["cluster"] = pasted["cluster"] | {"gpus_per_node": 4}
    (folder / "better.yaml").write_text(yaml.safe_dump(config))
    assert command("better.yaml", "--plan").code == 0


def test_the_best_config_is_written(command, folder: Path):
    sizes = [f"{role}.micro_batch_size=1" for role in ("actor", "critic")]
    ended = command("reasoning.yaml", CLUSTER, *sizes, "--plan=search", "--write", "new.yaml")
    assert ended.out.endswith("The config with the first is in new.yaml\n")
    pasted = yaml.safe_load(ended.out[ended.out.index("\ncluster:") : ended.out.index("\nThe config with")])
    written = yaml.safe_load((folder / "new.yaml").read_text())
    assert written["cluster"]["component_placement"] == pasted["cluster"]["component_placement"]
    assert written["actor"]["micro_batch_size"] == pasted["actor"]["micro_batch_size"] > 1
    assert command("new.yaml", "--plan").code == 0
    ended = command("reasoning.yaml", CLUSTER, "--plan", "--write", "other.yaml")
    assert ended.code == 2
    assert "--write belongs to --plan=search" in ended.err


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("new.yaml", "File exists"),
        ("nowhere/new.yaml", "No such file or directory"),
        ("new.yaml/other.yaml", "Not a directory"),
        (".", "File exists"),
        ("", "No such file or directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_search(
    command, folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, reason: str
):
    monkeypatch.setattr("rl_platform.launch.plans.plan_forms.search", lambda *_: pytest.fail("it searched"))
    (folder / "new.yaml").write_text("mine")
    ended = command("reasoning.yaml", CLUSTER, "--plan=search", "--write", file)
    assert (ended.code, ended.out) == (2, "")
    assert f"--write: cannot be written: {reason}" in ended.err
    assert (folder / "new.yaml").read_text() == "mine"


def test_a_search_without_a_model_ends_with_the_reason(command):
    ended = command("reasoning.yaml", "--plan=search", "actor.model={path: ./nowhere}")
    assert ended.code == 2
    assert "actor.model: nothing can be predicted: no config.json of ./nowhere is on this machine" in ended.err


@pytest.mark.parametrize("form", ["--plan", "--plan=search"])
def test_a_plan_loads_no_heavy_library_and_starts_nothing(folder: Path, program, form: str):
    code = (
        "import sys; from rl_platform.launch.cli import main\n"
        f"sys.argv = ['platform-launch', 'reasoning.yaml', {form!r}, {CLUSTER!r}]\n"
        "try: main()\n"
        f"finally: print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    ended = program(code)
    assert ended.code == 0, ended.err
    assert ended.cpu_seconds < 10
    assert ended.out.splitlines()[-1] == "[]"
    assert not (folder / "out").exists()


def test_a_real_run_calibrates_the_plan_of_its_own_config(command, folder: Path):
    assert command("reasoning.yaml", "runner.max_steps=3").code == 0
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    tree = json.loads(command("reasoning.yaml", "--plan=json", "--calibrate", "out/metrics.jsonl").out)
    predicted = {phase["phase"]: phase["seconds"] for phase in tree["step"]["phases"]}
    for phase in ("generate", "log-probs", "values", "train critic", "train actor"):
        measured = [row[f"time/{phase}"] for row in rows if row["step"] in (2, 3)]
        assert predicted[phase] == pytest.approx(sum(measured) / 2), phase
    text = command("reasoning.yaml", "--plan=search", "--calibrate", "out").out
    assert "corrected by 2 steps of out/metrics.jsonl" in text
    mean = sum(row["len/response_mean"] for row in rows if row["step"] in (2, 3)) / 2
    assert tree["step"]["lengths"]["response"] == pytest.approx(mean, abs=1)
    assert "(of out/metrics.jsonl)" in command("reasoning.yaml", "--plan", "--calibrate", "out").out


def test_a_real_embodied_run_calibrates_too(command, folder: Path):
    assert command("embodied.yaml", "runner.max_steps=2").code == 0
    tree = json.loads(command("embodied.yaml", "--plan=json", "--calibrate=out/metrics.jsonl").out)
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    predicted = {phase["phase"]: phase["seconds"] for phase in tree["step"]["phases"]}
    for phase in ("collect", "log-probs", "train actor"):
        assert predicted[phase] == pytest.approx(rows[2][f"time/{phase}"]), phase


def test_calibration_by_a_run_on_another_device_or_without_its_config_is_refused(command, folder: Path):
    assert command("reasoning.yaml", "runner.max_steps=1").code == 0
    ended = command("reasoning.yaml", CLUSTER, "--plan", "--calibrate", "out/metrics.jsonl")
    assert ended.code == 2
    assert "--calibrate: the run was timed on cpu, the plan is for h100" in ended.err
    ended = command("embodied.yaml", "--plan", "--calibrate", "out")
    assert ended.code == 2
    assert "--calibrate: the run is reasoning, the config is embodied" in ended.err
    (folder / "copy.jsonl").write_bytes((folder / "out" / "metrics.jsonl").read_bytes())
    ended = command("reasoning.yaml", "--plan", "--calibrate", "copy.jsonl")
    assert ended.code == 2
    assert "config.yaml is missing beside it" in ended.err
    ended = command("reasoning.yaml", "--calibrate", "out/metrics.jsonl")
    assert ended.code == 2
    assert "--calibrate belongs to --plan" in ended.err


def test_a_simulation_has_a_row_for_each_cluster_with_and_without_restarts(command):
    ended = command("reasoning.yaml", CLUSTER, "--plan=simulate", "cluster.restarts=2")
    assert ended.code == 0, ended.err
    rows = [line.split() for line in ended.out.splitlines() if " GPUs " in line]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        (devices, nodes, restarts)
        for devices, nodes in (("8", "2"), ("64", "16"), ("1,024", "256"), ("10,000", "2500"))
        for restarts in ("2", "0")
    ]
    assert ended.out == command("reasoning.yaml", CLUSTER, "--plan=simulate", "cluster.restarts=2").out


def test_a_machine_without_devices_is_simulated_alone(command):
    out = command("embodied.yaml", "--plan=simulate").out
    rows = [line.split()[:4] for line in out.splitlines() if "%" in line]
    assert rows == [["no", "GPU", "1", "0"]]  # nothing restarts a single process
    out = command("embodied.yaml", "--plan=simulate", "cluster.runtime=ray").out
    assert [line.split()[3] for line in out.splitlines() if "%" in line] == ["3", "0"]
    assert "Larger clusters: declare GPUs with cluster.inventory" in out


def test_a_cluster_that_cannot_grow_has_the_reason(command):
    out = command("reasoning.yaml", "cluster.gpus_per_node=3", "--plan=simulate").out
    assert "64 GPUs: placement and batches do not grow to whole numbers." in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.simulation.node_mtbf_hours=0", "cluster.simulation.node_mtbf_hours: out of range"),
        ("cluster.simulation.spread=-0.1", "cluster.simulation.spread: out of range"),
        ("cluster.simulation.slow_nodes=5", "cluster.simulation.slow_nodes: out of range"),
        ("cluster.simulation.slow_factor=0.5", "cluster.simulation.slow_factor: out of range"),
        ("cluster.simulation.mtbf=100", "cluster.simulation.mtbf: unknown key"),
        ("cluster.simulation.spread=much", "cluster.simulation.spread: the wrong type"),
        ("actor.model={path: nobody/nothing}", "actor.model: nothing can be predicted"),
        ("--write=new.yaml", "--write belongs to --plan=search"),
        ("--calibrate=nothing", "--calibrate"),
    ],
)
def test_wrong_input_of_a_simulation(command, override: str, message: str):
    ended = command("reasoning.yaml", CLUSTER, "--plan=simulate", override)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
