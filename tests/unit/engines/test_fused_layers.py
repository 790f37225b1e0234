"""Megatron's specification of layers for Transformer Engine, with a stand-in for Transformer Engine itself.

Here run: Megatron's wrappers around its modules, our attention in their midst, the names of fused norms, what is
exported and saved, and gradient norms of what tensor ranks share. Its kernels do not.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_checks import assert_close, learned

from rl_platform.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine"),
]
KINDS = ["critic", "qwen2", "qwen3", "experts", "shared experts", "qwen3 lora"]


@pytest.fixture(scope="module")
def results(runs: ModuleType, two_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By kind of model: the results of both ranks, of plain torch, and of plain torch continued from their state."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fused")
    two_ranks(Path(__file__).with_name("fused_stand_in.py"), folder)
    ranks = [torch.load(folder / f"fused-rank{rank}.pt", weights_only=False) for rank in range(2)]
    return {
        kind: {
            "ranks": [rank[kind] for rank in ranks],
            "plain": runs.ranks.run(runs.plain(kind), runs.KINDS[kind]),
            "resumed": runs.ranks.resumed(runs.plain(kind), runs.KINDS[kind], folder / f"fused-{kind}"),
        }
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_learn_what_plain_torch_learns(results: dict[str, Any], kind: str) -> None:
    expected = results[kind]["plain"]
    for actual in results[kind]["ranks"]:
        for part in ("start", "parameters", "outputs", "continued"):
            assert_close(actual[part], expected[part], 1e-5)
        assert learned(actual) == [pytest.approx(metrics, rel=1e-5, abs=1e-6) for metrics in learned(expected)]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_goes_on_from_what_fused_layers_have_saved(results: dict[str, Any], kind: str) -> None:
    for part in ("outputs", "continued"):
        assert_close(results[kind]["resumed"][part], results[kind]["plain"][part], 1e-5)


def test_norms_are_where_transformer_engine_has_them(results: dict[str, Any]) -> None:
    """Part of the linear layers after them, but for the norm before the router; nothing stands there twice."""
    names = {kind: set(results[kind]["ranks"][0]["names"]) for kind in KINDS}
    fused = {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}
    assert {name.removeprefix("decoder.layers.0.") for name in names["qwen2"]} >= fused
    for kind in KINDS:
        assert not any("input_layernorm" in name for name in names[kind])
        assert any("pre_mlp_layernorm" in name for name in names[kind]) == (kind in ("experts", "shared experts"))


def test_an_engine_that_cannot_be_imported_is_told(runs: ModuleType) -> None:
    """As one that was built for another torch."""
    with pytest.raises(ConfigError, match="Transformer Engine cannot be imported"):
        runs.megatron("actor", kernels="transformer_engine")
