"""On the pretended device every engine computes what it computes on the CPU, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_rehearsal.pretended_device import CPU, CUDA, Device, MixedDevices, pretended_device
from device_rehearsal.runs import (
    MICRO_BATCHES,
    Report,
    acted,
    assert_same,
    embodied_engine,
    generated,
    language_engine,
    sequences,
    sharing_short_prefixes,
    trained,
    transitions,
)
from stand_ins import context

from rl_platform.components.reference import LanguageReference
from rl_platform.config.schema import Config
from rl_platform.engines.offloading.offload import OffloadingEngine

RECOMPUTED = {"dtype": torch.bfloat16, "gradient_checkpointing": True}


def both(run: Callable[[torch.device], Report]) -> tuple[Report, Report]:
    """Returns the reports of the pretended device and of the CPU."""
    with pretended_device(), sharing_short_prefixes():
        found = run(CUDA)
    return found, run(CPU)


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=["float32", "bfloat16 recomputed"])
def test_fsdp(kind: str, options: dict[str, Any]) -> None:
    assert_same(*both(lambda device: trained(*language_engine(kind, device, **options), sequences())))


def test_offloaded_learner() -> None:
    def run(device: torch.device) -> Report:
        engine, loss = language_engine("actor", device)
        return trained(OffloadingEngine(engine, device), loss, sequences())

    assert_same(*both(run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_rollout(dtype: torch.dtype) -> None:
    """With an offload and an onload between the calls."""
    assert_same(*both(lambda device: generated(device, dtype)))


def test_embodied_step() -> None:
    assert_same(*both(lambda device: trained(*embodied_engine(device), transitions())))


def test_embodied_act() -> None:
    assert_same(*both(acted))


def test_reference() -> None:
    config = Config.model_validate(
        {
            "runner": {"task_type": "reasoning"},
            "cluster": {"component_placement": {"actor,critic,rollout,reward,reference": "all"}},
            "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1},
            "actor": {
                "model": {
                    "tokenizer": "bytes",
                    "random_init": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64},
                }
            },
            "critic": {"use_critic_model": True},
        }
    )

    def run(device: torch.device) -> Report:
        accelerators = (0,) if device == CUDA else ()
        return LanguageReference(replace(context("reference"), accelerators=accelerators), config).evaluate(sequences())

    assert_same(*both(run))


def test_a_tensor_left_on_the_cpu_is_named_with_file_and_line(device: Device) -> None:
    engine, loss = language_engine("actor", CUDA)
    temperature = torch.full((1,), 0.9)  # of main memory
    engine.model.temperature = temperature
    with pytest.raises(MixedDevices, match=r"\(1,\) of the CPU meets .* at platform/models/language\.py:\d+"):
        engine.step(sequences(), loss, MICRO_BATCHES)
