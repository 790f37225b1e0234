"""The `data` section: the task and the batch sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class Task(Section):
    """`data.task`: the source of prompts and answers."""

    type: Literal["reasoning_gym", "jsonl", "file", "digits"] = key(
        "reasoning_gym", "source of the questions; file: .jsonl, .json, .csv or .parquet, by the suffix"
    )
    name: str | None = key(None, "reasoning_gym: name of the data set")
    params: dict[str, Any] = Field(
        default_factory=dict, description="reasoning_gym, digits: parameters of the generator"
    )
    path: str | None = key(None, "jsonl, file: training file")
    val_path: str | None = key(None, "jsonl, file: validation file; null: the last data.val_size questions of path")
    prompt_column: str = key("question", "jsonl, file: field of the question")
    answer_column: str = key("answer", "jsonl, file: field of the expected answer")


class Data(Section):
    """`data`: the task and the batch sizes."""

    task: Task | None = key(None, "reasoning: source of the questions; required")
    train_size: int = key(10_000, "reasoning_gym, digits: number of distinct training prompts", ge=1)
    val_size: int = key(200, "number of validation prompts; none of them is a training prompt", ge=1)
    train_batch_size: int = key(64, "reasoning: prompts per step", ge=1)
    mini_batch_size: int = key(64, "rows per optimizer step, over all ranks (embodied: transitions)", ge=1)
    max_prompt_length: int = key(256, "largest number of tokens; longer prompts are skipped and counted", ge=1)
    max_response_length: int = key(64, "largest number of tokens; longer responses are truncated", ge=1)
    system_prompt: str | None = key(None, "system message of the chat template; null: the template's default")
    prompt_template: str = key("{question}", "text of the user message; {question} is replaced")
    use_chat_template: bool = key(True, "format prompts by the tokenizer's chat template; false: plain text")
    shuffle: bool = key(True, "shuffle the prompts anew in every epoch, from runner.seed")
