"""The share of a GPU that an SGLang engine takes where the config does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.config.schema import Config
from rl_platform.engines.rollout.sglang.program import share_of_free
from rl_platform.errors import ConfigError
from rl_platform.placement.estimates.engine_memory import EngineMemory, engine_memory, with_engine_memory
from rl_platform.placement.estimates.hardware import GIB
from rl_platform.placement.estimates.run_decisions import from_estimates
from rl_platform.placement.estimates.running import running_text, with_running_sequences
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.report_text import report_text

SGLANG = ("rollout.backend=sglang", "actor.model.dtype=bfloat16")
WIDE = ("actor.max_tokens_per_micro_batch=32000", "critic.max_tokens_per_micro_batch=32000")
APART: dict[str, object] = {"actor,critic,reward": "0-3", "rollout": "4-7"}


def derived(config: Config) -> EngineMemory | None:
    inventory = inventory_for(config.cluster)
    return engine_memory(config, schedule(config.cluster, inventory), inventory)


def test_an_engine_takes_what_its_running_sequences_need(plans: Any, tmp_path: Path) -> None:
    llama = plans.llama(tmp_path / "llama")
    lengths = ("data.max_prompt_length=1000", "data.max_response_length=3000", "data.train_batch_size=1024", *WIDE)
    config = plans.config(*SGLANG, llama, *lengths, "rollout.max_running_requests=32", placement=APART)
    engine = derived(config)
    assert engine is not None
    assert (engine.sequences, engine.wanted) == (32, 32)
    keys_and_values = 2 * 16 * 8 * 64 * 2 * 4000 * 32  # layers, heads, width, bytes, tokens, sequences
    assert engine.weights == pytest.approx(2 * 1.236e9, rel=0.01)
    assert engine.share * 80 * GIB == pytest.approx(1.1 * (engine.weights + keys_and_values), rel=0.02)
    assert with_engine_memory(config, engine).rollout.gpu_memory_utilization == engine.share
    assert with_engine_memory(config, None) is config
    two = derived(
        plans.config(
            *SGLANG,
            llama,
            *lengths,
            "rollout.max_running_requests=32",
            placement={"actor,critic,reward": "0-3", "rollout": "4-7:0-1"},
        )
    )
    assert two is not None
    assert two.share == pytest.approx(engine.share / 2, rel=0.01)
    assert str(engine) in report_text(plans.report(config))
    assert "all 32 running sequences" in str(engine)


def test_others_on_the_gpu_leave_it_less(plans: Any, tmp_path: Path) -> None:
    llama = plans.llama(tmp_path / "llama")
    lengths = ("data.max_prompt_length=1000", "data.max_response_length=31000", "data.train_batch_size=1024")
    small = (*WIDE, "actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true")
    settings = (*SGLANG, llama, *lengths, *small, "rollout.max_running_requests=256")
    shared: dict[str, object] = {"actor,critic,reward": "0-7", "rollout": "0-7"}
    engines = [
        derived(plans.config(*settings, placement=APART)),
        derived(plans.config(*settings, "rollout.offload=true", placement=shared)),
        derived(plans.config(*settings, "rollout.offload=false", placement=shared)),
    ]
    shares = [engine.share for engine in engines if engine is not None]
    assert len(shares) == 3
    assert 0.9 > shares[0] > shares[1] > shares[2]
    assert all(engine is not None and 1 <= engine.sequences < 128 for engine in engines)
    assert "of 128 running sequences" in str(engines[1])


@pytest.mark.parametrize(
    ("response", "rows", "running"),
    [(1000, 1024, 256), (1000, 320, 80), (31000, 1024, None)],
    ids=["at most 256", "the rows of a rank", "what fits"],
)
def test_the_number_of_running_sequences_follows_from_the_memory(
    response: int, rows: int, running: int | None, plans: Any, tmp_path: Path
) -> None:
    llama = plans.llama(tmp_path / "llama")
    lengths = ("data.max_prompt_length=1000", f"data.max_response_length={response}", f"data.train_batch_size={rows}")
    settings = (*SGLANG, llama, *lengths, *WIDE)
    config = plans.config(*settings, "rollout.max_running_requests=null", placement=APART)
    engine = derived(config)
    assert engine is not None
    derived_running = with_engine_memory(config, engine).rollout.max_running_requests
    assert derived_running == (running or engine.sequences)
    assert running or 64 < engine.sequences < engine.wanted == 256
    explicit = plans.config(*settings, "rollout.max_running_requests=8", placement=APART)
    assert with_engine_memory(explicit, derived(explicit)).rollout.max_running_requests == 8


def test_where_nothing_is_derived(plans: Any) -> None:
    assert derived(plans.config(*SGLANG, "rollout.gpu_memory_utilization=0.5", placement=APART)) is None
    assert derived(plans.config("rollout.backend=torch", placement=APART)) is None
    assert derived(plans.config(*SGLANG, placement=APART, gpu="")) is None
    assert derived(plans.config(*SGLANG, gpus=0)) is None


def test_no_room_for_one_sequence_is_told_before_anything_starts(plans: Any, tmp_path: Path) -> None:
    large = plans.llama(tmp_path / "large", num_hidden_layers=64, hidden_size=8192, intermediate_size=32768)
    config = plans.config(*SGLANG, large, placement=APART)
    with pytest.raises(ConfigError) as caught:
        derived(config)
    (problem,) = caught.value.problems
    assert problem.key == "rollout.gpu_memory_utilization"
    assert "for the keys and values of one sequence" in problem.message
    assert problem.message in report_text(plans.report(config))


def test_a_share_of_the_gpu_as_sglang_counts_it() -> None:
    assert share_of_free(0.3, [80], [0]) == pytest.approx(0.3)
    assert share_of_free(0.3, [80, 80], [20, 40]) == pytest.approx(0.6)
    assert share_of_free(0.6, [80], [70]) == 0.95


def running(config: Config) -> int | None:
    inventory = inventory_for(config.cluster)
    resolved = with_running_sequences(config, schedule(config.cluster, inventory), inventory)
    assert (running_text(config, resolved) is None) == (resolved is config)
    return resolved.rollout.max_running_requests


@pytest.mark.parametrize(
    ("response", "rows", "expected"),
    [(1000, 4096, 256), (1000, 320, 80), (31000, 4096, None), (14000, 4096, 128), (1000, 128, None)],
    ids=["at most 256", "the rows of a rank", "the default", "what fits", "fewer rows than the default"],
)
def test_the_torch_engine_decodes_as_many_sequences_as_fit(
    response: int, rows: int, expected: int | None, plans: Any, tmp_path: Path
) -> None:
    llama = plans.llama(tmp_path / "llama")
    lengths = ("data.max_prompt_length=1000", f"data.max_response_length={response}", f"data.train_batch_size={rows}")
    settings = (llama, *lengths, *WIDE, "actor.model.dtype=bfloat16", "rollout.max_running_requests=null")
    config = plans.config(*settings, "rollout.backend=torch", placement=APART)
    assert running(config) == expected
    if expected is not None:
        assert f"rollout.max_running_requests {expected}: they fit" in report_text(plans.report(config))


@pytest.mark.parametrize("backend", [SGLANG, ("rollout.backend=torch",)], ids=["sglang", "torch"])
def test_a_run_notes_once_how_many_sequences_are_decoded_together(backend: tuple[str, ...], plans: Any) -> None:
    many = ("data.train_batch_size=4096", "rollout.max_running_requests=null")
    config = plans.config(*many, *backend, placement=APART)
    inventory = inventory_for(config.cluster)
    decided = from_estimates(config, schedule(config.cluster, inventory), inventory)
    (note,) = (note for note in decided.notes if note.startswith("rollout."))
    assert str(decided.config.rollout.max_running_requests) in note


def test_what_the_torch_engine_decodes_stays_as_it_is(plans: Any) -> None:
    long = ("data.train_batch_size=4096", "rollout.backend=torch")
    assert running(plans.config(*long, "rollout.max_running_requests=8", placement=APART)) == 8
    assert running(plans.config(*long, "rollout.max_running_requests=null", gpus=0)) is None
    assert running(plans.config(*long, "rollout.max_running_requests=null", placement=APART, gpu="")) is None
    assert running(plans.config(*long, *SGLANG, "rollout.max_running_requests=null", placement=APART)) is None
