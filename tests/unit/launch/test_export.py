"""`rl-platform export`: what each format holds computes what the platform does, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lerobot_folders import STATES, STATS, folder_of, section, with_buffers, with_processors
from policies import KINDS, TOLD, observations, saved
from process_groups import end_process_groups
from smolvla_goldens import state
from transformers import AutoModelForCausalLM

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Flow
from rl_platform.errors import ConfigError
from rl_platform.launch.saved.loaded_policy import Policy
from rl_platform.launch.saved.policy_folder import built
from rl_platform.launch.saved.saved_run import SavedRun
from rl_platform.launch.tools.export import _write_lerobot
from rl_platform.models.embodied_policy import build_policy
from rl_platform.models.saved_policy import PolicyDescription, SavedPolicy, language_of
from rl_platform.rng import derive_seed

NOISY = ("pi0", "smolvla")
WIDE = replace(STATES, action_low=(-2.0,) * 6, action_high=(2.0,) * 6)


def inputs(kind: str) -> dict[str, np.ndarray]:
    """What a graph takes, for five rows."""
    given = {"observation": observations(kind, 5)}
    if kind == "memory":
        given["memory"] = np.zeros((5, 6), np.float32)
    if kind in TOLD:
        given["tasks"] = np.arange(5) % 2
    if kind in NOISY:  # as `Policy` draws it for its first choice
        draw = torch.Generator().manual_seed(derive_seed(saved(kind).description.seed, "rollout", "evaluate", 0, 1))
        given["noise"] = torch.empty(5, KINDS[kind][1].num_action_chunks, 2).normal_(generator=draw).numpy()
    return given


def check(kind: str, graph: Callable[..., Any]) -> None:
    """Compares two actions of `Policy` after another, for the same observations, with those of a graph."""
    policy, given = Policy(saved(kind)), inputs(kind)
    first, second = (policy.act(given["observation"], tasks=given.get("tasks")) for _ in range(2))
    assert len(np.unique(first, axis=0)) > 1, "all rows act alike"
    result = graph(**given)
    if kind == "memory":
        result, memory = result
        np.testing.assert_array_equal(graph(**given | {"memory": memory})[0], second)
    elif KINDS[kind][1].num_action_chunks > 1:
        np.testing.assert_allclose(result[:, 1], second, rtol=1e-5, atol=1e-6)
        result = result[:, 0]
    assert (result.dtype, result.shape) == (first.dtype, first.shape)
    np.testing.assert_allclose(result, first, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A run with Megatron in this process leaves a group of one rank behind, which ends with the process."""
    yield
    end_process_groups()


@pytest.fixture
def exported(tool, tmp_path: Path):
    """exported("memory", "onnx"): the folder."""

    def write(kind: str, format: str) -> Path:
        (tmp_path / kind).mkdir(exist_ok=True)
        saved(kind).write(tmp_path / kind)
        ended = tool("export", tmp_path / kind, "--format", format, "-o", tmp_path / f"{kind}-{format}")
        assert ended.code == 0, ended.err
        assert (ended.err, ended.out.splitlines()[0]) == ("", str(tmp_path / f"{kind}-{format}"))
        return tmp_path / f"{kind}-{format}"

    return write


def test_the_printed_call_loads_a_folder_with_quotes_in_its_name(tool, tmp_path: Path) -> None:
    saved("choices").write(tmp_path)
    ended = tool("export", tmp_path, "-o", tmp_path / 'it\'s a "ü"')
    assert ended.code == 0, ended.err
    call = ended.out.splitlines()[1].removeprefix("load it: ")
    assert callable(eval(call))


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_acts_as_the_policy(exported, kind: str) -> None:
    module = torch.export.load(exported(kind, "torch") / "policy.pt2").module()

    def graph(**given: np.ndarray) -> Any:
        result = module(**{name: torch.from_numpy(array) for name, array in given.items()})
        return [each.numpy() for each in result] if isinstance(result, tuple) else result.numpy()

    check(kind, graph)


@pytest.mark.parametrize("kind", ["several choices", "torques", "chunks", "memory", "instructions", "tokens", "pi0"])
def test_the_onnx_graph_acts_as_the_policy(exported, kind: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    session = runtime.InferenceSession(exported(kind, "onnx") / "policy.onnx")
    assert [each.name for each in session.get_inputs()] == [*inputs(kind)]
    assert [each.name for each in session.get_outputs()] == ["action", "next_memory"][: 1 + (kind == "memory")]

    def graph(**given: np.ndarray) -> Any:
        results = session.run(None, given)
        return results if len(results) > 1 else results[0]

    check(kind, graph)


CHILD = """
import sys, torch
program = torch.export.load("policy.pt2").module()
assert program(observation=torch.zeros(3, 3)).shape == (3, 2, 1)
assert not [name for name in sys.modules if name.startswith("rl_platform")]
from rl_platform.launch.saved.loaded_policy import load_policy
assert not {"ray", "gymnasium", "mujoco", "transformers"} & {*sys.modules}
"""


def test_a_program_needs_no_package_and_load_policy_few(exported) -> None:
    subprocess.run([sys.executable, "-c", CHILD], cwd=exported("torques", "torch"), check=True)


def smolvla(folder: Path, **changes: Any) -> tuple[Any, SavedPolicy]:
    """Returns a run that started from this folder of LeRobot and changed the weights, and its policy."""
    model = section(folder, num_action_chunks=2, flow=Flow(denoising_steps=3), **changes)
    policy, levels = build_policy(model, WIDE, ActionLevels(2, 6), 1, ["go"]), ActionLevels(2, 6)
    with torch.no_grad():
        policy.network.action_out_proj.weight *= 1.5
    about = PolicyDescription(
        environment="Toy-v0",
        step=7,
        seed=3,
        model=model.model_copy(update={"path": None}),
        spaces=WIDE,
        levels=levels,
        normalizer=None,
        language=language_of(policy),
    )
    config = SimpleNamespace(actor=SimpleNamespace(model=model))
    return SimpleNamespace(load=lambda overrides: SimpleNamespace(config=config)), SavedPolicy(
        about, policy.state_dict()
    )


@pytest.mark.parametrize("stored", [True, False], ids=["statistics", "no statistics"])
def test_a_folder_of_lerobot_acts_as_the_run(stored: bool, tmp_path: Path) -> None:
    """Denoising steps and executed actions of the run differ from those of the folder that it started from."""
    folder, out = folder_of(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    if stored:
        with_processors(folder)
    run, saved = smolvla(folder)
    _write_lerobot(run, saved, out)
    options = json.loads((out / "config.json").read_text())
    assert (options["num_steps"], options["n_action_steps"]) == (3, 2)
    exported = build_policy(
        section(out, num_action_chunks=options["n_action_steps"]), WIDE, ActionLevels(2, 6), 1, ["go"]
    )
    executed = []
    for policy in (built(saved), exported):
        rows, _ = policy.act(state(), torch.Generator().manual_seed(5), deterministic=True)
        executed.append(policy.executed(rows))
    assert executed[0].abs().max() > 1
    assert torch.equal(*executed)
    center, scale = STATS["action"].values() if stored else (0, 1)
    written = rows[:, -12:].view(-1, 2, 6)  # by the network
    torch.testing.assert_close(executed[1], written * scale + center)


def test_a_folder_of_lerobot_that_would_act_differently_is_refused(tmp_path: Path) -> None:
    run, saved = smolvla(folder_of(tmp_path))
    bounds = {"action_range.low": torch.full((6,), -2.0), "action_range.high": torch.full((6,), 2.0)}
    with pytest.raises(ConfigError, match="LeRobot would act differently: low of the range of actions"):
        _write_lerobot(run, replace(saved, weights=saved.weights | bounds), tmp_path)
    with_processors(tmp_path, {"observation.state": STATS["observation.state"]})
    with pytest.raises(ConfigError, match="center of the range of states"):
        _write_lerobot(run, saved, tmp_path)
    older = with_buffers(folder_of(tmp_path / "older"), "so100_")
    with pytest.raises(ConfigError, match="selects no data set"):
        _write_lerobot(*smolvla(older, unnorm_key="so100"), tmp_path)


LANGUAGE_MODELS = {
    "fsdp": (),
    "megatron": ("actor.training_backend=megatron",),
    "adapters": ("actor.lora={rank: 2, target_modules: [q_proj, down_proj]}", "actor.optim.lr=0.05"),
}


@pytest.mark.filterwarnings("ignore")  # of Megatron, about kernels that are not installed
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_checkpoint_becomes_the_folder_that_its_run_leaves(command, tool, scored, folder: Path, kind: str) -> None:
    save = ("runner.max_steps=2", "runner.save_interval=1")
    ended = command("reasoning.yaml", scored, *save, *LANGUAGE_MODELS[kind])
    assert ended.code == 0, ended.err
    ended = tool("export", "out", "-o", "last")
    assert ended.code == 0, ended.err
    assert tool("export", "out", "--step", 1).code == 0
    names = ["last", "out/export/hf-step-1", "out/model"]
    last, first, left = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in names)
    assert last.keys() == left.keys()
    assert all(torch.equal(last[name], left[name]) for name in left)
    assert not all(torch.equal(first[name], left[name]) for name in left)
    files = {path.name for path in (folder / "out" / "model").iterdir()}
    assert {path.name for path in (folder / "last").iterdir()} == files


def test_a_checkpoint_that_was_linked_or_renamed(command, tool, scored, folder: Path) -> None:
    assert command("reasoning.yaml", scored, "runner.max_steps=1").code == 0
    checkpoints = folder / "out" / "checkpoints"
    (checkpoints / "best").symlink_to("step-00000001")
    ended = tool("export", "out/checkpoints/best")
    assert (ended.code, f"{folder}/out/export/hf-step-1" in ended.out) == (0, True), ended.err
    (checkpoints / "best").unlink()
    (checkpoints / "step-00000001").rename(checkpoints / "best")
    ended = tool("export", "out/checkpoints/best", "-o", "new")
    assert (ended.code, "the right name is step-00000001" in ended.err) == (65, True), ended.err
    assert not (folder / "new").exists()


@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_a_run_that_deletes_its_checkpoint_meanwhile(
    command, tool, folder: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    assert command(f"{task}.yaml", "runner.save_interval=2").code == 0
    checkpoints, opened = folder / "out" / "checkpoints", SavedRun.open
    hidden = shutil.move(checkpoints / "step-00000004", folder / "later")

    def goes_on(run: SavedRun, config: Config) -> Checkpoint:
        checkpoint = opened(run, config)
        if checkpoint.step == 2:
            shutil.move(hidden, checkpoints / "step-00000004")
            shutil.rmtree(checkpoints / "step-00000002")
        return checkpoint

    monkeypatch.setattr(SavedRun, "open", goes_on)
    ended = tool("export", "out")
    assert ended.code == 0, ended.err
    assert "step-4" in ended.out
    assert [path.name.rpartition("-")[2] for path in (folder / "out" / "export").iterdir()] == ["4"]


def test_what_is_refused(command, tool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("choices").write(folder / make("policy"))
    (folder / make("full") / "notes.txt").touch()
    assert command("reasoning.yaml", "runner.max_steps=1", "runner.output_dir=words").code == 0
    assert command("embodied.yaml", "runner.max_steps=1").code == 0
    for words, message in (
        (["missing"], "rl-platform export: no such folder"),
        (["reasoning.yaml"], "is a file, not the folder of a run"),
        (["out", "--step", "9"], "no checkpoint of step 9\n    value: 9\n    allowed: 1\n"),
        (["policy", "--step", "9"], "holds the policy of one step\n    value: 9\n    allowed: 7\n"),
        (["out", "--format", "hf"], "--format: holds language models, and this run trained an embodied policy"),
        (["words", "--format", "onnx"], "--format: holds embodied policies, and this run trained a language model"),
        (["out", "--format", "lerobot"], "LeRobot could not load the folder"),
        (["words", "--format", "lerobot"], "--format: holds embodied policies, and this run trained a language model"),
        (["out", "--format", "gguf"], "gguf"),
        (["policy", "-o", "full"], "--output: is not empty"),
        (["policy", "-o", "policy.onnx"], "an export is a folder of several files"),
        (["out", "--format", "hf", "-o", "full"], "2 problems:\n--format: holds language models"),
        (["policy", "-o", "reasoning.yaml"], "reasoning.yaml is a file"),
        (["policy", "-o", "reasoning.yaml/x"], "reasoning.yaml is a file"),
    ):
        ended = tool("export", *words)
        assert (ended.code, message in ended.err) == (2, True), (words, ended.err)
        assert "Traceback" not in ended.err
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = tool("export", "policy", "--format", "onnx", "-o", "graph")
    assert (ended.code, "hint: pip install 'rl-platform[onnx]'" in ended.err) == (2, True)
    assert not [path.name for path in folder.iterdir() if "graph" in path.name]


def make(name: str) -> Path:
    Path(name).mkdir()
    return Path(name)
