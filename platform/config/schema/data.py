"""The `data` section: the task and the batch sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section, key

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class Task(Section):
    """`data.task`: where prompts and answers come from."""

    type: Literal["reasoning_gym", "jsonl", "file", "digits"] = key(
        "reasoning_gym", "which source; file: .jsonl, .json, .csv or .parquet, by the suffix"
    )
    name: str | None = key(None, "reasoning_gym: dataset name")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of a generated task")
    path: str | None = key(None, "jsonl, file: training file")
    val_path: str | None = key(None, "jsonl, file: validation file; null: the last data.val_size questions of path")
    prompt_column: str = key("question", "jsonl, file: field with the prompt")
    answer_column: str = key("answer", "jsonl, file: field with the answer")


class Data(Section):
    """`data`: the task and the batch sizes."""

    task: Task | None = key(None, "reasoning only, and required there")
    train_size: int = key(10_000, "generated tasks: number of distinct training prompts", ge=1)
    val_size: int = key(200, "validation prompts, never among the training prompts", ge=1)
    train_batch_size: int = key(64, "reasoning: prompts per step", ge=1)
    mini_batch_size: int = key(64, "rows (embodied: transitions) behind one optimizer step", ge=1)
    max_prompt_length: int = key(256, "tokens; longer prompts are left out and counted", ge=1)
    max_response_length: int = key(64, "tokens; longer responses are cut", ge=1)
    system_prompt: str | None = key(None, "system turn of the chat template; null: the template's own")
    prompt_template: str = key("{question}", "user turn; {question} is replaced")
    use_chat_template: bool = key(True, "false: the prompt is the bare text")
    shuffle: bool = key(True, "a new order every epoch, from runner.seed")
