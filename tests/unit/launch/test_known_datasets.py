"""`rl-platform data`: files of known datasets, from local copies in their formats, and what goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions

datasets = pytest.importorskip("datasets", reason="Hugging Face datasets need the extra data")

MESSAGE = {"role": "user", "content": "Solve: x = 2?"}
DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\nSay it.\n\nAssistant:"
GOOD: dict[str, dict[str, list[dict[str, Any]]]] = {
    "gsm8k": {
        "train": [{"question": f"{n} eggs?", "answer": f"so <<{n}>>\n#### {n},000"} for n in range(3)],
        "test": [{"question": "one egg?", "answer": "#### 1"}],
    },
    "math": {
        "train": [{"problem": "half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1", "type": "A"}],
        "test": [
            {"problem": "two?", "solution": r"\boxed{1}, no: \boxed{2}", "level": "Level 2", "type": "A"},
            {"problem": "three?", "solution": r"$\boxed 3$", "level": "Level 2", "type": "A"},
            {"problem": "four?", "solution": r"\fbox{4}", "level": "Level 2", "type": "A"},
        ],
    },
    "dapo-math": {
        "train": [
            {"data_source": "d", "prompt": [MESSAGE], "reward_model": {"style": "rule", "ground_truth": "2"}},
            {"data_source": "d", "prompt": [MESSAGE], "reward_model": {"style": "rule", "ground_truth": "2"}},
            {"data_source": "d", "prompt": [{"role": "user", "content": "y?"}], "reward_model": {"ground_truth": "34"}},
        ]
    },
    "aime24": {"train": [{"id": 1, "problem": "p?", "answer": "33"}, {"id": 2, "problem": "q?", "answer": "4"}]},
    "hh-rlhf": {
        "train": [{"prompt": DIALOGUE, "response": " So.", "chosen": " So.", "rejected": " No."}],
        "test": [
            {"prompt": "\n\nHuman: Q\n\nAssistant:", "response": " A", "chosen": " A", "rejected": " B"},
            {"prompt": "\n\nHuman: Silence?\n\nAssistant:", "response": " ", "chosen": " ", "rejected": " B"},
        ],
    },
}


@pytest.fixture
def copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[dict[str, Any]]]], str]:
    """copy({"train": rows}): a folder that `save_to_disk` wrote."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")

    def write(splits: dict[str, list[dict[str, Any]]]) -> str:
        made = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        datasets.DatasetDict(made).save_to_disk(folder / "copy")
        return str(folder / "copy")

    return write


def read(printed: str, **changes: Any) -> Split:
    """The questions of the config that the command printed."""
    written = yaml.safe_load(printed[printed.index("\ndata:\n") :])["data"]
    return build_questions(Data.model_validate(written | changes), seed=1)


@pytest.mark.parametrize("kind", GOOD)
def test_the_printed_config_reads_the_files(tool, copy, kind: str) -> None:
    ended = tool("data", kind, "--from", copy(GOOD[kind]), "--output", "made")
    assert ended.code == 0, ended.err
    split = read(ended.out, val_size=3 if kind == "math" else 1)
    found = [(question.text, question.answer) for question in (*split.train, *split.validation)]
    assert (
        found
        == {
            "gsm8k": [("0 eggs?", "0000"), ("1 eggs?", "1000"), ("2 eggs?", "2000"), ("one egg?", "1")],
            "math": [("half?", r"\frac{1}{2}"), ("two?", "2"), ("three?", "3"), ("four?", "4")],
            "dapo-math": [("Solve: x = 2?", "2"), ("y?", "34")],
            "aime24": [("p?", "33"), ("q?", "4")],
            "hh-rlhf": [("user: Hi\n\nassistant: Hello\n\nuser: Why?\nSay it.", "So."), ("Q", "A")],
        }[kind]
    )
    assert ("1 repeated ones left out" in ended.out) == (kind == "dapo-math")
    assert ("1 without an answer left out" in ended.out) == (kind == "hh-rlhf")


def test_dialogues_without_a_column_prompt(tool, copy) -> None:
    rows = [{"chosen": f"{DIALOGUE} So.", "rejected": f"{DIALOGUE} No."}]
    assert tool("data", "hh-rlhf", "--from", copy({"train": rows, "test": rows})).code == 0
    (line,) = Path("data/hh_rlhf_train.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "user"]
    assert row["chosen"] == "So."


def test_a_copy_of_the_files_of_the_hub(tool, copy, folder: Path) -> None:
    (folder / "hub").mkdir()
    for split, rows in GOOD["math"].items():
        (folder / "hub" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert tool("data", "math", "--from", "hub").code == 0
    assert len(Path("data/math_train.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("gsm8k", [{"question": "x", "answer": "7"}], "row 1: column 'answer' has no result after ####"),
        ("gsm8k", [{"question": "x"}], "row 1: no column 'answer'. Columns there: question"),
        (
            "math",
            [GOOD["math"]["train"][0], {"problem": "x", "solution": "2"}],
            "row 2: column 'solution' has no \\boxed",
        ),
        (
            "dapo-math",
            [{"prompt": "x", "reward_model": {"ground_truth": "1"}}],
            "column 'prompt' must be a list",
        ),
        ("dapo-math", [{"prompt": [MESSAGE]}], "row 1: no column 'reward_model.ground_truth'"),
        ("hh-rlhf", [{"chosen": "Hi", "rejected": "x"}], "row 1: no dialogue of turns"),
    ],
)
def test_wrong_rows(tool, copy, kind: str, rows: list[dict[str, Any]], message: str) -> None:
    ended = tool("data", kind, "--from", copy({"train": rows}))
    assert ended.code == 65
    assert message in ended.err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--from", "gone", "-o", "reasoning.yaml"], ["2 problems:", "--output: is a file", "--from: no such folder"]),
        (["--from", "embodied.yaml"], ["--from: is a file, not the folder of a copy"]),
        (["--from", "copy", "-o", "/proc/made"], ["--output: cannot be written", "/proc/made/gsm8k_train.jsonl"]),
        (["--from", "copy", "more"], ["more"]),
    ],
)
def test_wrong_folders(tool, copy, arguments: list[str], messages: list[str]) -> None:
    copy(GOOD["gsm8k"])
    ended = tool("data", "gsm8k", *arguments)
    assert ended.code == 2
    for message in messages:
        assert message in ended.err


@pytest.mark.parametrize(("name", "cause"), [("notes.xyz", "No (supported) data files"), ("rows.json", "caused by ")])
def test_a_folder_of_another_kind_names_the_cause_and_the_kinds(tool, folder: Path, name: str, cause: str) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / name).write_text("neither JSON nor rows\n")
    ended = tool("data", "gsm8k", "--from", "mine")
    assert ended.code == 65
    assert cause in ended.err
    assert "A folder holds files of one kind, .parquet, .json, .jsonl, .csv, .txt or .arrow, or what" in ended.err


def test_an_unknown_dataset(tool) -> None:
    ended = tool("data", "gsm9k")
    assert ended.code == 2
    assert "'gsm9k' is not one of 'gsm8k', 'math'" in ended.err


def test_without_a_network(tool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    ended = tool("data", "gsm8k")
    assert ended.code == 65
    assert "openai/gsm8k: cannot be loaded" in ended.err
    assert "Then: rl-platform data gsm8k --from FOLDER" in ended.err


def test_without_the_package(tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    ended = tool("data", "gsm8k")
    assert ended.code == 2
    assert (
        "rl-platform data: a Hugging Face dataset is read by the package datasets, which is not installed" in ended.err
    )
    assert "pip install" in ended.err
