"""A model that computes other numbers than transformers is refused at load, with the layer where it begins."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_families import tiny

from rl_platform.errors import DataError
from rl_platform.models import language
from rl_platform.models.attention import Features
from rl_platform.models.language import LanguageModel, LogitTransform
from rl_platform.models.packed import PackedAttention
from rl_platform.models.pretrained.probe import LONG, own_forward, probe, probe_sequences


def probed(network: Any, **changes: Any) -> None:
    model = LanguageModel(network)
    for name, value in changes.items():
        setattr(model, name, value)
    probe(network, partial(own_forward, network, model), "FOLDER", "actor.model.path")


def spoiled(monkeypatch: pytest.MonkeyPatch, layer: int, **changes: Any) -> None:
    """Attention of one layer has other features from now on."""
    plain = language._attend

    def attend(module: Any, *tensors: Any, **options: Any) -> Any:
        return plain(module, *tensors, **(options | changes if module.layer_idx == layer else options))

    monkeypatch.setattr(language, "_attend", attend)


@pytest.mark.parametrize("value_head", [False, True])
def test_the_same_numbers_pass_and_the_model_is_as_before(value_head: bool) -> None:
    network = tiny("gemma2")
    model = LanguageModel(network, value_head=value_head)
    probe(network, partial(own_forward, network, model), "FOLDER", "actor.model.path")
    assert model.backbone.config._attn_implementation == "rl_platform"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "changes", "where"),
    [
        ("gemma2", {"softcap": None}, "in layer 0 of 2"),
        ("gemma2", {"sliding_window": None}, "in layer 0 of 2"),
        ("mistral", {"sliding_window": 3}, "in layer 1 of 2 (counted from 0) or in the final norm"),
        ("gpt_oss", {"s_aux": None}, "in layer 1 of 2"),
        ("deepseek_v3", {"softcap": 2.0}, "in layer 1 of 2"),
    ],
)
def test_the_layer_where_it_begins(
    family: str, changes: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, int(where.split()[2]), **changes)
    with pytest.raises(DataError) as caught:
        probed(tiny(family))
    assert f"actor.model.path: FOLDER ({family}) computes other numbers here than in transformers" in str(caught.value)
    assert where in str(caught.value)
    assert caught.value.exit_code == 65


def test_the_output_head(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="the difference begins in the output head"):
        probed(tiny("gemma2"), logit_transform=LogitTransform())


def test_sequences_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the packed batch shows it."""
    plain = PackedAttention.__call__

    def leaking(
        self: Any, layer: int, query: Any, key: Any, value: Any, scaling: float, features: Features | None
    ) -> Any:
        out = plain(self, layer, query, key, value, scaling, features)
        return out + 0.1 * out.mean(0) if len(self.shapes) > 1 or self.prefix else out

    monkeypatch.setattr(PackedAttention, "__call__", leaking)
    with pytest.raises(DataError, match=r"for a packed batch of two sequences .* begins in layer 0 of 2"):
        probed(tiny("llama"))


def test_numbers_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="in the output head"):
        probed(tiny("llama"), logit_transform=LogitTransform(scale=float("nan")))


def test_short_windows_are_crossed() -> None:
    assert [len(tokens) for tokens in probe_sequences(tiny("mistral", sliding_window=100))] == [7, 100 + LONG, 7]
    assert [len(tokens) for tokens in probe_sequences(tiny("mistral", sliding_window=4096))] == [7, LONG, 7]


def test_components_probe_what_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_platform.config.schema import Config
    from rl_platform.models.build import language_model

    tiny("qwen2").save_pretrained(tmp_path)
    section = {"path": str(tmp_path), "tokenizer": "bytes"}
    config = Config(
        runner={"task_type": "reasoning", "max_steps": 1},
        cluster={"component_placement": {"actor,rollout,reward": "all"}},
        actor={"model": section},
        data={"max_prompt_length": 8, "max_response_length": 8},
    )
    assert language_model(config, config.actor.model, 0, probed=True).config.model_type == "qwen2"
    spoiled(monkeypatch, 0, softcap=0.5)
    with pytest.raises(DataError, match=r"actor\.model\.path: .* in layer 0 of 2"):
        language_model(config, config.actor.model, 0, probed=True)
