"""Whole runs in the layouts that others test part by part, through the command: they learn what one process learns.

Two processes of the Ray runtime train actor and critic; a third one generates and scores.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron, about kernels that are not installed
]
STEPS = 3
TWO_RANKS = "cluster.component_placement={'actor,critic': 'all:0-1', 'rollout,reward': all}"


def both(*overrides: str) -> list[str]:
    """For actor and critic."""
    return [f"{role}.{override}" for role in ("actor", "critic") for override in overrides]


EXPERTS = ["actor.model={path: ./experts, tokenizer: bytes}"]
FOUR_LAYERS = ["actor.model.random_init.num_layers=4"]
TENSOR = ["parallel.tensor=2"]
ADAPTERS = [*both("lora={rank: 4}"), "algorithm={use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.1}}"]
INTERLEAVED = both("training_backend=megatron", "parallel={pipeline: 2, virtual_pipeline: 2}", "micro_batch_size=2")
COMPARED = [
    "algorithm={use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.1}}",
    "cluster.component_placement={'actor,critic,reference,rollout,reward': all}",
]
THREE_MODELS = "cluster.component_placement={'actor,critic,reference': 'all:0-1', 'rollout,reward': all}"
OWN_RANKS = "cluster.component_placement={'actor,critic': 'all:0-1', reference: 'all:0-1', 'rollout,reward': all}"
STAGES = ["reference.training_backend=megatron", "reference.parallel.pipeline=2", OWN_RANKS]
LAYOUTS: dict[str, tuple[list[str], list[str]]] = {  # what is trained, and how two ranks do it
    "experts": (EXPERTS, both("training_backend=megatron", "parallel.expert=2")),
    "interleaved stages": (FOUR_LAYERS, INTERLEAVED),
    "tokens shared": ([], both("parallel.context=2")),
    "tokens shared on Megatron": ([], both("training_backend=megatron", "parallel.context=2")),
    "adapters": (ADAPTERS, []),
    "adapters on Megatron": (ADAPTERS, both("training_backend=megatron", *TENSOR)),
    "reference": (COMPARED, [*both("training_backend=megatron", *TENSOR), THREE_MODELS]),
    "full KL": ([*COMPARED, "algorithm.kl_penalty=full"], [*both("training_backend=megatron", *TENSOR), THREE_MODELS]),
    "sharded reference": (COMPARED, [THREE_MODELS]),
    "reference in stages": (COMPARED, STAGES),
}


@pytest.mark.usefixtures("experts", "forked_workers")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_in_a_layout(command, final_state, scored: str, folder: Path, name: str) -> None:
    """It ends as that of one process, which goes on from its checkpoints; and its export is what it has learned."""
    trained, layout = LAYOUTS[name]
    rest = [*trained, scored, f"runner.max_steps={STEPS}", "runner.save_interval=1"]
    for output, overrides in (("alone", []), ("spread", [TWO_RANKS, *layout])):
        ended = command("reasoning.yaml", *rest, *overrides, f"runner.output_dir={output}")
        assert ended.code == 0, ended.err
    shards = [file.name for file in (folder / f"spread/checkpoints/step-{STEPS:08d}/actor").glob("*.distcp")]
    assert sorted(shards) == ["__0_0.distcp", "__1_0.distcp"]
    assert_same(final_state("spread", STEPS), final_state("alone", STEPS))
    ours, theirs = (load_file(folder / output / "model" / "model.safetensors") for output in ("spread", "alone"))
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=1e-5, atol=1e-5)
    AutoModelForCausalLM.from_pretrained(folder / "spread" / "model")

    shutil.rmtree(folder / f"spread/checkpoints/step-{STEPS:08d}")
    ended = command("reasoning.yaml", *rest, "runner.output_dir=spread")
    assert ended.code == 0, ended.err
    assert f"resumed from step {STEPS - 1}" in ended.out
    assert_same(final_state("spread", STEPS), final_state("alone", STEPS))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for role in ("actor", "critic"):
        assert found[role]["model"].keys() == expected[role]["model"].keys()
        assert max(float(tensor.abs().max()) for tensor in expected[role]["model"].values()) > 1e-3
        for name, tensor in expected[role]["model"].items():
            torch.testing.assert_close(
                found[role]["model"][name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
