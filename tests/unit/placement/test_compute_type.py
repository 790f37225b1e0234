"""The type that `model.dtype: auto` selects, and the notes on types that save no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.launch.placed_config import load
from rl_platform.placement.estimates import compute_type, hardware

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs/reasoning/ppo_tiny.yaml"
AUTO = ["actor.model.dtype=auto"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_platform.placement.inventory.detect_accelerators", lambda: ((), ""))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives this machine a processor with these flags."""

    def having(flags: str) -> None:
        monkeypatch.setattr(compute_type, "cpu_flags", lambda: {"fpu", "avx2", *flags.split()})

    return having


@pytest.mark.parametrize(
    ("flags", "dtype", "why"),
    [
        ("avx512_bf16 amx_bf16 amx_tile", "bfloat16", "this processor has AMX-BF16"),
        ("avx512f avx512_bf16", "bfloat16", "this processor has AVX512-BF16"),
        ("avx512f", "float32", "this processor has neither AMX-BF16 nor AVX512-BF16"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(processor: Any, flags: str, dtype: str, why: str) -> None:
    processor(flags)
    loaded, _, _ = load(str(CONFIG), AUTO)
    assert loaded.config.actor.model.dtype == dtype
    assert f"actor.model.dtype auto is {dtype} here: {why}" in loaded.notes
    assert f"dtype: {dtype}" in loaded.resolved_yaml()


def test_a_critic_with_a_model_of_its_own_has_a_type_of_its_own(processor: Any) -> None:
    processor("amx_bf16")
    loaded, _, _ = load(str(CONFIG), ["critic.model.dtype=auto"])
    assert loaded.config.critic.model is not None
    assert (loaded.config.actor.model.dtype, loaded.config.critic.model.dtype) == ("float32", "bfloat16")


def test_a_machine_that_does_not_list_its_flags_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "absent")
    assert hardware.cpu_flags() == set()


@pytest.mark.parametrize(("kind", "dtype"), [("h100", "bfloat16"), (None, "float32")])
def test_auto_on_gpus(kind: str | None, dtype: str, processor: Any) -> None:
    processor("")
    declared = ["cluster.gpus_per_node=1"]
    if kind is not None:
        declared = [f"cluster.inventory={{nodes: 1, gpus_per_node: 1, gpu: {kind}}}"]
    loaded, _, _ = load(str(CONFIG), [*AUTO, *declared])
    assert loaded.config.actor.model.dtype == dtype


def test_embodied_policies_stay_float32(processor: Any) -> None:
    processor("amx_bf16")
    loaded, _, _ = load(str(ROOT / "configs/embodied/cartpole.yaml"), AUTO)
    assert loaded.config.actor.model.dtype == "float32"


@pytest.mark.parametrize(("flags", "notes"), [("amx_bf16", 0), ("avx512f", 1)])
def test_bfloat16_on_a_processor_without_it_is_noted(flags: str, notes: int, processor: Any) -> None:
    processor(flags)
    loaded, _, _ = load(str(CONFIG), ["actor.model.dtype=bfloat16"])
    assert loaded.config.actor.model.dtype == "bfloat16"
    assert len([note for note in loaded.notes if "actor.model.dtype bfloat16 saves no time here" in note]) == notes
