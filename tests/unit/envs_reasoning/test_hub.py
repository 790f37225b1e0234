"""Questions in Hugging Face datasets, nested columns and lists of messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rl_platform.config.schema.data import Data, QuestionTask
from rl_platform.envs.reasoning.prompts import build_prompts
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets", reason="Hugging Face datasets need the extra data")

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def rows(count: int, start: int = 0) -> list[dict[str, object]]:
    """Rows as verl writes them."""
    return [
        {
            "prompt": [*CHAT[:1], {"role": "user", "content": f"What is {n}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "level": n,
        }
        for n in range(start, start + count)
    ]


def of(folder: Path, val_size: int = 2, **task: object) -> Data:
    columns = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"}
    return Data(task=QuestionTask(**({"type": "dataset", "path": str(folder)} | columns | task)), val_size=val_size)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the splits train (5 rows) and test (3 rows)."""
    splits = {"train": rows(5), "test": rows(3, 4)}
    made = {name: datasets.Dataset.from_list(split) for name, split in splits.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_folder_with_splits(saved: Path) -> None:
    split = build_questions(of(saved, val_split="test"), seed=1)
    assert [question.answer for question in split.train] == ["0", "1", "2", "3"]
    assert [question.answer for question in split.validation] == ["4", "5"]
    first = split.train[0]
    assert first.messages == (CHAT[0], {"role": "user", "content": "What is 0?"})
    assert first.text == "system: Be brief.\n\nuser: What is 0?"
    assert first.metadata == {"reward_model": {"style": "rule", "ground_truth": "0"}, "level": 0}


def test_every_container_holds_the_same_questions(saved: Path, tmp_path: Path) -> None:
    expected = build_questions(of(saved), seed=1)
    datasets.Dataset.from_list(rows(5)).save_to_disk(tmp_path / "one")
    (tmp_path / "plain").mkdir()
    lines = "\n".join(map(json.dumps, rows(5)))
    (tmp_path / "plain" / "train.jsonl").write_text(lines)
    datasets.Dataset.from_list(rows(5)).to_parquet(tmp_path / "rows.parquet")
    assert build_questions(of(tmp_path / "one"), seed=1) == expected
    assert build_questions(of(tmp_path / "plain"), seed=1) == expected
    assert build_questions(of(tmp_path / "plain" / "train.jsonl", type="file"), seed=1) == expected
    assert build_questions(of(tmp_path / "rows.parquet", type="file"), seed=1) == expected


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"split": "validation"}, r"saved: no split validation. Splits there: train, test"),
        ({"val_split": "dev"}, r"no split dev"),
        (
            {"prompt_column": "question"},
            r"saved \[train\], row 1: no column 'question'. Columns there: prompt, ",
        ),
        (
            {"answer_column": "reward_model.truth"},
            r"row 1: no column 'reward_model.truth'. .*, reward_model.ground_truth",
        ),
        (
            {"answer_column": "reward_model"},
            r"row 1: column 'reward_model' must be a text that is not empty, or a number",
        ),
        ({"path": "no/such"}, r"no/such: cannot be loaded: .* needs a network"),
    ],
)
def test_wrong_datasets_name_the_place(
    saved: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=expected) as caught:
        build_questions(of(saved, **task), seed=1)
    assert caught.value.exit_code == 65


def test_a_folder_of_one_dataset_has_no_splits(tmp_path: Path) -> None:
    datasets.Dataset.from_list(rows(5)).save_to_disk(tmp_path)
    with pytest.raises(DataError, match="without splits, so it has no split train"):
        build_questions(of(tmp_path, split="train"), seed=1)


def test_without_the_package(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data\.task\.type.*not installed") as caught:
        build_questions(of(saved), seed=1)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "the last message must have the role user"),
        ([*CHAT, {"role": "assistant", "content": "2"}], "the last message must have the role user"),
        ([{"role": "human", "content": "x"}], r'message 1: role "human" must be one of system, user, assistant'),
        ([{"role": "user", "content": " "}], "message 1: content must be a text that is not empty"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1: content must be a text"),
        ([{"role": "user"}], "message 1: must have the fields role and content"),
        (
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            "message 1: must have the fields role",
        ),
        (["x"], 'message 1: .* not "x"'),
        ({"role": "user", "content": "x"}, "must be a text that is not empty, or a list of messages"),
    ],
)
def test_wrong_messages(tmp_path: Path, messages: object, expected: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [{"prompt": CHAT}, {"prompt": messages}])))
    with pytest.raises(DataError, match=rf"a\.jsonl:2: column 'prompt'.*{expected}") as caught:
        build_questions(of(tmp_path / "a.jsonl", type="jsonl", answer_column=None), seed=1)
    assert caught.value.exit_code == 65


class Turns:
    """Renders turns as bytes, as a chat template does; refuses system turns."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if any(message["role"] == "system" for message in messages):
            raise ValueError("the chat template refuses it: no system role")
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


def prompts_of(tmp_path: Path, messages: list[dict[str, str]], **data: object) -> list[tuple[int, ...]]:
    lines = [{"prompt": messages}, {"prompt": [{"role": "user", "content": "held out"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = of(tmp_path / "a.jsonl", 1, type="jsonl", answer_column=None).model_copy(update=data)
    return [prompt.token_ids for prompt in build_prompts(build_questions(source, 1).train, Turns(), source).prompts]


def test_messages_are_rendered_as_they_are(tmp_path: Path) -> None:
    dialogue = [CHAT[1], {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert [bytes(tokens) for tokens in prompts_of(tmp_path, dialogue)] == [b"<user>1+1?<assistant>2<user>Sure?"]


def test_messages_that_the_template_refuses_name_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: the messages cannot be rendered: .* no system role"):
        prompts_of(tmp_path, CHAT)


@pytest.mark.parametrize(
    "data", [{"system_prompt": "Think."}, {"prompt_template": "Q: {question}"}, {"use_chat_template": False}]
)
def test_keys_without_effect_on_messages_are_refused(tmp_path: Path, data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"data.{next(iter(data))}"):
        prompts_of(tmp_path, CHAT[1:], **data)
