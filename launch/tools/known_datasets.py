"""`rl-platform data KIND`: writes the questions of known datasets as JSON Lines for `data.task`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rl_platform.envs.reasoning.sources.hub import dataset_rows
from rl_platform.envs.reasoning.sources.rows import column, final_answer
from rl_platform.errors import ConfigError, DataError, Problem, problems_of
from rl_platform.launch.written import writing

Columns = dict[str, object]
_TURN = re.compile(r"\n\n(Human|Assistant):")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{$]+)")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Known:
    """A known dataset. files: name of the file by split. columns: makes the columns of a file of those of a row; None
    leaves the row out. task, data: further keys of the config to paste.
    """

    hub: str
    files: dict[str, str]
    columns: Callable[[Columns, str], Columns | None]
    config: str | None = None
    task: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)


def prepare(kind: str, output: Path, source: Path | None) -> Iterator[str]:
    """Writes the files of a dataset into `output` and yields lines for the terminal, the config to paste last.

    source: a folder with a copy of the dataset; None: the Hugging Face hub. Repeated prompts are written once. Raises
    DataError if the dataset cannot be loaded or a row lacks what is needed, ConfigError for wrong folders and without
    the package `datasets`.
    """
    known = KNOWN[kind]
    problems = [] if output.is_dir() or not output.exists() else [Problem("--output", "is a file", value=str(output))]
    if source is not None and not source.is_dir():
        message = "is a file, not the folder of a copy" if source.exists() else "no such folder"
        problems.append(Problem("--from", message, value=str(source)))
    if problems:
        raise ConfigError(problems)
    paths = [output / name for name in known.files.values()]
    lines = []
    with ExitStack() as files:
        stages = [files.enter_context(writing(path, (".jsonl",))) for path in paths]  # before a long download
        for split, path, stage in zip(known.files, paths, stages, strict=True):
            rows = _rows(kind, known, source, split)
            kept = [columns for where, row in rows if (columns := known.columns(row, where)) is not None]
            prompts: dict[str, str] = {}
            for columns in kept:
                prompts.setdefault(json.dumps(next(iter(columns.values()))), json.dumps(columns))
            stage.write_text("".join(f"{line}\n" for line in prompts.values()), encoding="utf-8")
            out = ((len(kept) - len(prompts), "repeated ones"), (len(rows) - len(kept), "without an answer"))
            lines.append(f"{path}: {len(prompts)} prompts" + "".join(f", {n} {what} left out" for n, what in out if n))
    yield from lines
    keys = ("path", "val_path") if "test" in known.files else ("path",)
    task = {"type": "jsonl", **dict(zip(keys, map(str, paths), strict=True)), **known.task}
    yield "\n" + yaml.safe_dump({"data": {"task": task, **known.data}}, sort_keys=False, width=120).rstrip()


def _rows(kind: str, known: Known, source: Path | None, split: str) -> list[tuple[str, Columns]]:
    with problems_of("rl-platform data", "data.task.type"):
        if source is None:
            try:
                return dataset_rows(known.hub, known.config, split)
            except DataError as error:
                raise DataError(f"{error} Then: rl-platform data {kind} --from FOLDER") from error
        described = (source / "README.md").is_file()  # a copy of the hub's files, whose configs are named there
        return dataset_rows(str(source), known.config if described else None, split)


def _gsm8k(row: Columns, where: str) -> Columns:
    answer = _text(row, "answer", where)
    if "####" not in answer or not final_answer(answer):
        raise DataError(f"{where}: column 'answer' has no result after ####.")
    return {"question": _text(row, "question", where), "answer": answer}


def _math(row: Columns, where: str) -> Columns:
    from rl_platform.envs.reasoning.answers.finding import boxed

    solution = _text(row, "solution", where).replace("\\fbox{", "\\boxed{")
    answers = boxed(solution) or _BARE_BOX.findall(solution)
    if not answers or not answers[-1].strip():
        raise DataError(f"{where}: column 'solution' has no \\boxed{{...}}.")
    extra: Columns = {name: row[name] for name in ("level", "type") if name in row}
    return {"question": _text(row, "problem", where), "answer": answers[-1].strip(), **extra}


def _dapo(row: Columns, where: str) -> Columns:
    messages = column(row, "prompt", where)
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        raise DataError(f"{where}: column 'prompt' must be a list of one message.")
    answer = str(column(row, "reward_model.ground_truth", where))
    return {"question": _text(messages[0], "content", f"{where}, column 'prompt'"), "answer": answer}


def _aime(row: Columns, where: str) -> Columns:
    return {"question": _text(row, "problem", where), "answer": str(column(row, "answer", where))}


def _hh_rlhf(row: Columns, where: str) -> Columns | None:
    """Returns the dialogue up to the last turn of the assistant, and this turn of the preferred dialogue; None if it is
    empty.

    Dahoas/full-hh-rlhf has the two in columns of their own, Anthropic/hh-rlhf in one.
    """
    _, *parts = _TURN.split(_text(row, "prompt" if "prompt" in row else "chosen", where))
    turns = [
        {"role": _ROLES[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not turns or turns[-1]["role"] != "assistant" or len(turns) < 2:
        raise DataError(f"{where}: no dialogue of turns 'Human:' and 'Assistant:' that ends with one of the assistant.")
    chosen = str(column(row, "chosen", where)).strip() if "prompt" in row else turns[-1]["content"]
    return {"prompt": turns[:-1], "chosen": chosen} if chosen else None


def _text(row: Columns, name: str, where: str) -> str:
    value = column(row, name, where)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: column '{name}' must be a text that is not empty.")
    return value


_BOXED = "{question}\nReason step by step. Put the final answer in \\boxed{}."
KNOWN = {
    "gsm8k": Known(
        "openai/gsm8k",
        {"train": "gsm8k_train.jsonl", "test": "gsm8k_test.jsonl"},
        _gsm8k,
        config="main",
        data={"prompt_template": _BOXED},
    ),
    "math": Known(
        "DigitalLearningGmbH/MATH-lighteval",
        {"train": "math_train.jsonl", "test": "math_test.jsonl"},
        _math,
        data={"prompt_template": _BOXED},
    ),
    "dapo-math": Known("BytedTsinghua-SIA/DAPO-Math-17k", {"train": "dapo_train.jsonl"}, _dapo),
    "aime24": Known("HuggingFaceH4/aime_2024", {"train": "aime24.jsonl"}, _aime),
    "hh-rlhf": Known(
        "Dahoas/full-hh-rlhf",
        {"train": "hh_rlhf_train.jsonl", "test": "hh_rlhf_test.jsonl"},
        _hh_rlhf,
        task={"prompt_column": "prompt", "answer_column": "chosen"},
    ),
}
