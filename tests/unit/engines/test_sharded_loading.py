"""A rank of a sharded model loads its share: what it holds, and how much memory that takes at most."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import end_process_groups
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Optim, Parallel
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.sharded_state import ShardedTensor
from rl_platform.models import build
from rl_platform.models.build import language_model
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.forward import TokenPolicy, TokenValues
from rl_platform.models.pretrained import weight_parts
from rl_platform.models.pretrained.weight_parts import WeightParts

ROOT = Path(__file__).parents[3]
RANKS, LAYERS = 4, 8
CPU: dict[str, Any] = {"dtype": torch.float32, "horizon": 8, "device": torch.device("cpu")}


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    """A run whose model has 8 layers; layers are larger than the embedding."""
    options = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS, "vocab_size": 259}
    shape = AutoConfig.for_model("qwen2", **options, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="200KB")
    overrides = [f"actor.model={{path: {tmp_path}, tokenizer: bytes}}"]
    yield load_config(ROOT / "configs/reasoning/ppo_tiny.yaml", overrides).config
    end_process_groups()


def as_rank(rank: int) -> None:
    """This process becomes one of four ranks, whose messages go nowhere: loading sends none."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    end_process_groups()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)


def live_bytes() -> int:
    """Bytes of all tensors of this process in main memory."""
    sizes = {}
    for tensor in [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        with suppress(RuntimeError):  # those of oneDNN and of exports, which other tests left, have no address
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize(("kind", "cpu_offload"), [("actor", False), ("critic", True)])
def test_fsdp_ranks_hold_their_shares_and_never_the_whole(
    config: Config, monkeypatch: pytest.MonkeyPatch, kind: str, cpu_offload: bool
) -> None:
    critic = kind == "critic"
    whole = language_model(config, config.actor.model, 1, value_head=critic).state_dict()
    layer = sum(tensor.nbytes for name, tensor in whole.items() if "layers.0." in name)
    size = sum(tensor.nbytes for tensor in whole.values())
    peaks: list[int] = []
    read = WeightParts.__iter__

    def measured(self: WeightParts) -> Iterator[dict[str, Tensor]]:
        for part in read(self):
            if dist.get_rank() == 1:
                peaks.append(live_bytes())
            yield part

    monkeypatch.setattr(WeightParts, "__iter__", measured)
    held: dict[str, int] = dict.fromkeys(whole, 0)
    for rank in range(RANKS):
        as_rank(rank)
        before = live_bytes()
        model = language_model(config, config.actor.model, 1, value_head=critic)
        assert all(parameter.is_meta for parameter in model.backbone.parameters())
        wrapped = TokenValues(model) if critic else TokenPolicy(model, 1.0)
        engine = FSDPEngine(wrapped, Optim(lr=1e-3), cpu_offload=cpu_offload, **CPU)
        for name, tensor in engine.model.state_dict(keep_vars=True).items():
            for (first, *_), share in ShardedTensor.of(tensor).parts:
                assert torch.equal(share, whole[name.removeprefix("model.")][first : first + len(share)])
                held[name.removeprefix("model.")] += len(share)
        if rank == 1:
            assert len(peaks) > LAYERS
            assert max(peaks) - before < size / RANKS + 1.05 * layer
            assert max(peaks) - before < size / 2
        del engine, model, wrapped
        gc.collect()
    assert held == {name: len(tensor) for name, tensor in whole.items()}


def test_the_first_layers_of_a_sharded_model_are_probed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_several_ranks", lambda: True)
    probed = []
    monkeypatch.setattr(weight_parts, "probe", lambda network, *_: probed.append(network.config.num_hidden_layers))
    language_model(config, config.actor.model, 1, probed=True)
    assert probed == [2]
    kinds = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    windows = AutoConfig.for_model("gemma3_text", num_hidden_layers=7, layer_types=kinds)
    assert weight_parts.first_layers(windows).num_hidden_layers == 6
    assert weight_parts.first_layers(AutoConfig.for_model("deepseek_v3", num_hidden_layers=6)).num_hidden_layers == 4


def test_megatron_starts_from_the_same_weights(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_platform.engines.training.megatron.engine import MegatronEngine

    whole = language_model(config, config.actor.model, 1).state_dict()
    monkeypatch.setattr(build, "_several_ranks", lambda: True)
    model = language_model(config, config.actor.model, 1)
    assert model.pretrained is not None
    engine = MegatronEngine(TokenPolicy(model, 1.0), Optim(lr=1e-3), parallel=Parallel(), **CPU)
    weights = engine.weights()
    assert weights.keys() == {f"model.{name}" for name in whole}
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in whole.items())
