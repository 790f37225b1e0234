"""Layouts that cannot be are refused before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.placed_config import load
from rl_platform.launch.start_checks.sharding import check_kernels, check_sharding, device_problems, sharding_problems

pytestmark = pytest.mark.usefixtures("folder")
MEGATRON = ("actor.training_backend=megatron", "critic.training_backend=megatron")
FOUR = "cluster.component_placement={'actor,critic': 'all:0-3', 'rollout,reward': all}"
APART = "cluster.component_placement={actor: 'all:0-3', critic: 'all:0-3', 'rollout,reward': all}"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def problems(*overrides: str) -> dict[str, Problem]:
    config, placement, _ = load("reasoning.yaml", [*MEGATRON, *overrides])
    refused = [*sharding_problems(config.config, placement), *device_problems(config.config, placement)]
    return {problem.key: problem for problem in refused}


def test_ranks_hold_whole_copies():
    assert problems(FOUR, "actor.parallel.tensor=2", "critic.parallel.tensor=2") == {}
    refused = problems(FOUR, "actor.parallel.tensor=3", "critic.parallel.tensor=3")
    assert refused.keys() == {"actor.parallel", "critic.parallel"}
    assert "4 ranks of actor" in refused["actor.parallel"].message
    assert "the 3 ranks" in refused["actor.parallel"].message


def test_models_of_one_process_have_one_layout():
    refused = problems(FOUR, "actor.parallel.tensor=2")
    assert refused.keys() == {"critic.parallel"}
    assert "that of the actor is tensor 2, pipeline 1" in refused["critic.parallel"].message
    assert problems(APART, "actor.parallel.tensor=2") == {}
    assert problems(FOUR, "actor.parallel={tensor: 2, sequence: true}", "critic.parallel.tensor=2") == {}


ALL = "cluster.component_placement={'actor,critic,reference': 'all:0-3', 'rollout,reward': all}"
ALONE = "cluster.component_placement={'actor,critic': 'all:0-3', reference: 'all:0-2', 'rollout,reward': all}"
COMPARED = ("algorithm.use_kl_loss=true", "actor.parallel.tensor=2", "critic.parallel.tensor=2")


def test_the_ranks_of_a_reference_hold_whole_copies_too():
    assert problems(ALL, *COMPARED) == {}
    refused = problems(ALONE, *COMPARED)
    assert refused.keys() == {"reference.parallel"}
    assert "3 ranks of reference" in refused["reference.parallel"].message
    assert problems(ALONE, *COMPARED, "reference.parallel.pipeline=3") == {}
    assert problems(ALONE, *COMPARED, "reference.training_backend=fsdp") == {}
    context = "reference={training_backend: fsdp, parallel: {context: 2}}"
    assert problems(ALONE, *COMPARED, context).keys() == {"reference.parallel.context"}


def test_a_reference_in_the_actors_processes_has_the_actors_layout():
    refused = problems(ALL, *COMPARED, "reference.parallel.pipeline=2")
    assert refused.keys() == {"reference.parallel"}
    assert "that of the actor is tensor 2, pipeline 1" in refused["reference.parallel"].message
    assert problems(ALL, *COMPARED, "reference.training_backend=fsdp") == {}
    beside = "cluster.component_placement={actor: 'all:0-3', 'critic,reference': 'all:0-3', 'rollout,reward': all}"
    assert "that of the critic" in problems(beside, *COMPARED, "critic.parallel.tensor=4")["reference.parallel"].message


def test_a_reference_of_another_model_is_asked_whether_it_fits():
    own = "reference.model={random_init: {num_heads: 3, hidden_size: 24, max_positions: 16}, tokenizer: bytes}"
    for overrides, keys in (
        ([own, "actor.parallel.tensor=2", "critic.parallel.tensor=2"], ["reference.parallel.tensor"]),
        (["reference.parallel.tensor=4", "actor.parallel.tensor=2"], ["reference.parallel.tensor"]),
        (["actor.parallel.tensor=4"], ["actor.parallel.tensor"]),  # told once
    ):
        config, placement, _ = load("reasoning.yaml", [*MEGATRON, ALL, "algorithm.use_kl_loss=true", *overrides])
        with pytest.raises(ConfigError) as caught:
            check_sharding(config.config, placement)
        assert [problem.key for problem in caught.value.problems] == keys


def test_expert_ranks_are_counted_beside_tensor_ranks():
    both = "actor.parallel.expert={}", "critic.parallel.expert={}"
    assert problems(FOUR, *(text.format(4) for text in both)) == {}
    refused = problems(FOUR, *(text.format(8) for text in both))
    assert refused.keys() == {"actor.parallel", "critic.parallel"}
    assert "the 8 ranks" in refused["actor.parallel"].message
    assert "expert * pipeline" in refused["actor.parallel"].hint
    assert "expert 4" in problems(FOUR, "actor.parallel.expert=4")["critic.parallel"].message


def test_ranks_that_share_tokens_hold_copies_together():
    assert problems(FOUR, "actor.parallel={context: 2, tensor: 2}", "critic.parallel.tensor=2") == {}
    refused = problems(FOUR, "actor.parallel={context: 4, tensor: 2}", "critic.parallel.tensor=2")
    assert refused.keys() == {"actor.parallel"}
    assert "8 ranks that split a model" in refused["actor.parallel"].message
    assert refused["actor.parallel"].value == "tensor 2, pipeline 1, context 4"


def test_ranks_that_share_tokens_divide_the_heads_of_a_tensor_rank():
    heads = "actor.model.random_init={num_heads: 4, num_kv_heads: 4}"
    for size, fits in ((2, True), (4, False)):
        layout = f"actor.parallel={{tensor: 2, context: {size}}}"
        config, placement, _ = load("reasoning.yaml", [*MEGATRON, FOUR, heads, layout])
        if fits:
            check_sharding(config.config, placement)
            continue
        with pytest.raises(ConfigError, match="a tensor rank's 2 attention heads") as caught:
            check_sharding(config.config, placement)
        assert [problem.key for problem in caught.value.problems] == ["actor.parallel.context"]


@pytest.mark.parametrize("backend", [[], MEGATRON], ids=["fsdp", "megatron"])
def test_only_experts_are_balanced_and_selected_again(backend: list[str]):
    routers = "actor.router_aux_loss_coef=0.01", "actor.router_replay=true", "rollout.backend=torch"
    config, placement, _ = load("reasoning.yaml", [*backend, *routers])
    with pytest.raises(ConfigError, match="a llama model has none") as caught:
        check_sharding(config.config, placement)
    assert [problem.key for problem in caught.value.problems] == ["actor.router_aux_loss_coef", "actor.router_replay"]


@pytest.mark.parametrize(("rows", "number"), [(1, 4), (2, 2), (4, 1)])
def test_interleaved_stages_take_as_many_micro_batches_as_there_are_stages(rows: int, number: int):
    """Two copies of two stages share 8 rows."""
    interleaved = "actor.parallel={pipeline: 2, virtual_pipeline: 2}", f"actor.micro_batch_size={rows}"
    refused = problems(APART, *interleaved, "data.mini_batch_size=8")
    assert refused.keys() == ({"actor.micro_batch_size"} if number % 2 else set())
    if number % 2:
        assert "a rank's 4 rows of a mini-batch make 1" in refused["actor.micro_batch_size"].message


def test_fused_layers_that_are_not_there(monkeypatch: pytest.MonkeyPatch):
    asked = "actor.kernels=transformer_engine"
    assert "needs a GPU" in problems(asked)["actor.kernels"].message
    torch = "rollout.backend=torch"  # `auto` would look for SGLang
    find, own = importlib.util.find_spec, "rl_platform."
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if name.startswith(own) else None)
    assert "is not installed" in problems(asked, torch, "cluster.gpus_per_node=1")["actor.kernels"].message
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if name.startswith(own) else name)
    assert problems(asked, torch, "cluster.gpus_per_node=1") == {}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('undefined symbol: _ZN3c105ErrorC2E')", "ImportError: undefined symbol"),
        ("import os; os._exit(3)", "exit code 3"),
        ("", None),
    ],
)
def test_fused_layers_that_are_there_and_cannot_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str | None
):
    """As those that were built for another torch; asked for by the actor, which the reference follows."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").touch()
    (folder / "transformer_engine" / "pytorch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    config, placement, _ = load("reasoning.yaml", [*MEGATRON, ALL, *COMPARED, "actor.kernels=transformer_engine"])
    if message is None:
        check_kernels(config.config, placement)
        return
    with pytest.raises(ConfigError) as caught:
        check_kernels(config.config, placement)
    (problem,) = caught.value.problems
    assert problem.key == "actor.kernels"
    assert message in problem.message
    asked = "actor.kernels=transformer_engine"
    joined, placement, _ = load("reasoning.yaml", [*MEGATRON, asked, "cluster.address=auto"])
    check_kernels(joined.config, placement)  # the machines of a cluster may be others


def test_nothing_is_imported_for_layers_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    config, placement, _ = load("reasoning.yaml", [*MEGATRON])
    check_kernels(config.config, placement)


def test_a_model_on_the_cpu_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch):
    assert problems() == {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert problems("cluster.gpus_per_node=0").keys() == {"actor.training_backend", "critic.training_backend"}
    assert problems("cluster.gpus_per_node=1") == {}


def test_every_model_is_asked_whether_it_fits():
    config, placement, _ = load(
        "reasoning.yaml", [*MEGATRON, FOUR, "actor.parallel.tensor=4", "critic.parallel.pipeline=4"]
    )
    with pytest.raises(ConfigError) as caught:
        check_sharding(config.config, placement)
    assert [problem.key for problem in caught.value.problems] == ["actor.parallel.tensor", "critic.parallel.pipeline"]


def test_plain_torch_takes_any_model():
    config, placement, _ = load("reasoning.yaml", [FOUR])
    check_sharding(config.config, placement)


def test_the_command_says_it(folder: Path, command):
    override = "actor.model.random_init.num_heads=1"
    ended = command("reasoning.yaml", *MEGATRON, "actor.parallel.tensor=2", override)
    assert ended.code == 2
    assert "actor.parallel" in ended.err
    assert not (folder / "out").exists()
