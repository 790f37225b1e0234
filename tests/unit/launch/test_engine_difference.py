"""The explanation of differences between the log-probs of rollout and trainer."""

from __future__ import annotations

import copy

import pytest
import tiny_families
import torch

from rl_platform.engines.rollout.decoder import FusedDecoder
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.launch.replay import engine_difference
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack
from rl_platform.records import Weights

TOKENS, PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 7


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe", "deepseek_v2"])
@torch.no_grad()
def test_hidden_states_of_both_engines_are_those_of_transformers(family: str) -> None:
    network = tiny_families.tiny(family)
    expected = network(torch.tensor([TOKENS]), output_hidden_states=True)
    model = LanguageModel(copy.deepcopy(network))
    packed = pack([torch.tensor(TOKENS)])
    with engine_difference._Observed(model) as observed:
        model.hidden(packed.tokens, packed.positions, packed.attention)
    engine = TorchRolloutEngine(copy.deepcopy(network.config), (), 1, torch.device("cpu"))
    engine.receive(Weights(0, model.state_dict()))
    assert isinstance(engine._decoder, FusedDecoder) == (family in ("llama", "qwen3"))
    log_probs, states = engine_difference.forced(engine, TOKENS[:PROMPT], TOKENS[PROMPT:], 1.0)
    assert len(states) == len(observed.states) == len(expected.hidden_states) == 3
    for of_rollout, of_trainer, whole in zip(states, observed.states, expected.hidden_states, strict=True):
        assert len(of_rollout) == len(TOKENS) - 1
        for found, right in ((of_rollout, whole[0, :-1]), (of_trainer[0], whole[0])):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    wanted = expected.logits[0, PROMPT - 1 : -1].log_softmax(-1).gather(1, torch.tensor(TOKENS[PROMPT:])[:, None])
    torch.testing.assert_close(log_probs, wanted.squeeze(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 17", "digits"),
        ("\n\t ", "whitespace"),
        (" word", "letters"),
        (").", "punctuation"),
        ("x1", "other"),
        ("\ufffd", "other"),
        ("", "whitespace"),
    ],
)
def test_classes_of_tokens(text: str, expected: str) -> None:
    assert engine_difference.token_class(text) == expected
