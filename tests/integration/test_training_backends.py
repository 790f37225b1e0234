"""The same run with either training backend learns the same, and one goes on from what the other has saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine"),
    pytest.mark.filterwarnings("ignore"),  # of Megatron, about kernels that are not installed
]
BACKENDS = ("fsdp", "megatron")
COMPARED = (  # to a reference in the same process, on the actor's backend
    "algorithm={use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.1}, ppo_epochs: 2}",
    "cluster.component_placement={'actor,critic,reference,rollout,reward': all}",
)


def overrides(backend: str) -> tuple[str, ...]:
    return tuple(f"{role}.training_backend={backend}" for role in ("actor", "critic"))


def largest_difference(first: Any, second: Any) -> float:
    """Of all tensors in two states of the same form."""
    if isinstance(first, torch.Tensor):
        assert first.shape == second.shape
        return float((first - second).abs().max())
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        return max((largest_difference(first[key], second[key]) for key in first), default=0.0)
    return 0.0


def assert_moved(state: dict[str, Any]) -> None:
    """Gradients were there: runs without a reward would be equal too."""
    for role in ("actor", "critic"):
        moments = [tensor for name, tensor in state[role]["optimizer"].items() if name.endswith("exp_avg")]
        assert max(float(tensor.abs().max()) for tensor in moments) > 1e-4, role


@pytest.fixture
def learned(command, final_state, scored: str):
    """learned("megatron"): models and optimizers after three steps, in the folder of that name."""

    def run(backend: str, *more: str) -> dict[str, Any]:
        kept = "runner.max_steps=3", "runner.save_interval=1", "runner.keep_checkpoints=3"
        ended = command("reasoning.yaml", scored, *overrides(backend), *kept, f"runner.output_dir={backend}", *more)
        assert ended.code == 0, ended.err
        assert_moved(final_state(backend, 3))
        return final_state(backend, 3)

    return run


def test_same_run(learned, logged, folder: Path) -> None:
    """Also in other micro-batches: the plain backend takes a mini-batch at once."""
    plain = learned("fsdp", *COMPARED)
    megatron = learned("megatron", *COMPARED, "actor.micro_batch_size=1", "critic.micro_batch_size=2")
    for role in ("actor", "critic"):
        assert max(float(tensor.abs().max()) for tensor in plain[role]["model"].values()) > 0.1
        assert largest_difference(plain[role], megatron[role]) < 1e-4
    exported = [load_file(folder / backend / "model" / "model.safetensors") for backend in BACKENDS]
    assert largest_difference(*exported) < 1e-4
    rows = logged("fsdp")
    assert max(abs(row.get("reward/kl", 0.0)) for row in rows) > 1e-4
    for row, other in zip(rows, logged("megatron"), strict=True):
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        assert {name: other[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("before", "after"), [BACKENDS, BACKENDS[::-1]])
def test_one_goes_on_from_the_other(
    command, final_state, learned, scored: str, folder: Path, before: str, after: str
) -> None:
    undisturbed = learned(before)
    shutil.rmtree(folder / before / "checkpoints" / "step-00000003")
    ended = command("reasoning.yaml", scored, *overrides(after), "runner.max_steps=3", f"runner.output_dir={before}")
    assert ended.code == 0, ended.err
    resumed = final_state(before, 3)
    for role in ("actor", "critic"):
        assert largest_difference(undisturbed[role], resumed[role]) < 1e-4
