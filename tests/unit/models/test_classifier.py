"""A reward model gives in a batch what transformers gives one by one, and what is none is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from reward_parts import make_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rl_platform.components.reward_models.classifier import SequenceClassifier, load_parts
from rl_platform.config.schema.reward import RewardModel
from rl_platform.errors import ConfigError

CPU = torch.device("cpu")
TEXTS = ["short", "a longer text!", "!", "one that is longer than all others"]


def conversation(response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Why? "}, {"role": "assistant", "content": response}]


def one_by_one(folder: Path, rows: list[list[int]]) -> list[float]:
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [network(input_ids=torch.tensor([row])).logits.item() for row in rows]


@pytest.mark.parametrize("pad", [None, "<pad>"])
@pytest.mark.parametrize("chat", [True, False])
def test_a_batch_scores_like_transformers_one_by_one(tmp_path: Path, pad: str | None, chat: bool) -> None:
    make_classifier(tmp_path, pad=pad)
    classifier = SequenceClassifier(RewardModel(path=str(tmp_path), use_chat_template=chat), CPU)
    rows = [classifier.encode(conversation(text)) for text in TEXTS]
    expected = one_by_one(tmp_path, rows)
    assert len({round(value, 3) for value in expected}) == len(TEXTS)
    assert classifier.scores(rows) == pytest.approx(expected, abs=1e-5)
    assert classifier.scores(rows[1:2]) == pytest.approx(expected[1:2], abs=1e-5)


def test_without_a_padding_token_none_that_ends_a_text_pads(tmp_path: Path) -> None:
    """Decoders look for the last token that is no padding: the first tokens of the vocabulary are real ones."""
    make_classifier(tmp_path)
    classifier = SequenceClassifier(RewardModel(path=str(tmp_path)), CPU)
    for rows in ([[7, 0], [5, 6, 7, 1], [9]], [[7, 2], [5, 6, 7, 1], [9]]):
        assert classifier.scores(rows) == pytest.approx(one_by_one(tmp_path, rows), abs=1e-5)


def test_what_is_read(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = SequenceClassifier(RewardModel(path=str(tmp_path)), CPU).encode(conversation("so"))
    bare = SequenceClassifier(RewardModel(path=str(tmp_path), use_chat_template=False), CPU).encode(conversation("so"))
    assert tokenizer.convert_ids_to_tokens(turns) == ["<user>", *"Why?Ġ", "<end>", "<assistant>", *"so", "<end>"]
    assert tokenizer.convert_ids_to_tokens(bare) == [*"Why?Ġso"]


def test_bfloat16_is_close_and_not_equal(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    rows = [[7, 0], [5, 6, 7, 1]]
    scores = SequenceClassifier(RewardModel(path=str(tmp_path), dtype="bfloat16"), CPU).scores(rows)
    expected = one_by_one(tmp_path, rows)
    assert scores != expected
    assert scores == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("labels", "template", "section", "message"),
    [
        (2, "", {}, "reward.model.path: a reward is one number, this classifier has 2 labels"),
        (1, None, {}, "reward.model.use_chat_template: the tokenizer has no chat template"),
        (1, None, {"path": "./nowhere"}, "reward.model.path: no such model"),
        (1, None, {"tokenizer": "./nowhere"}, "reward.model.tokenizer: "),
    ],
)
def test_what_is_no_reward_model_is_refused(
    tmp_path: Path, labels: int, template: str | None, section: dict[str, str], message: str
) -> None:
    make_classifier(tmp_path, num_labels=labels, template=template)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_parts(RewardModel(**({"path": str(tmp_path)} | section)))


def test_a_language_model_has_no_score_to_load(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"1 weights are missing, as score\.weight: is it a classifier"):
        SequenceClassifier(RewardModel(path=str(tmp_path)), CPU)
