"""The `data` section: the task and the batch sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section


class Task(Section):
    """`data.task`: where prompts and answers come from."""

    type: Literal["reasoning_gym", "jsonl", "digits"] = Field(default="reasoning_gym", description="which source")
    name: str | None = Field(default=None, description="reasoning_gym: dataset name")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of a generated task")
    path: str | None = Field(default=None, description="jsonl: training file")
    val_path: str | None = Field(default=None, description="jsonl: validation file; null: the last data.val_size lines")
    prompt_column: str = Field(default="question", description="jsonl: field with the prompt")
    answer_column: str = Field(default="answer", description="jsonl: field with the answer")


class Data(Section):
    """`data`: the task and the batch sizes."""

    task: Task | None = Field(default=None, description="reasoning only, and required there")
    train_size: int = Field(default=10_000, ge=1, description="generated tasks: number of distinct training prompts")
    val_size: int = Field(default=200, ge=1, description="validation prompts, never among the training prompts")
    train_batch_size: int = Field(default=64, ge=1, description="reasoning: prompts per step")
    mini_batch_size: int = Field(default=64, ge=1, description="rows (embodied: transitions) behind one optimizer step")
    max_prompt_length: int = Field(default=256, ge=1, description="tokens; longer prompts are left out and counted")
    max_response_length: int = Field(default=64, ge=1, description="tokens; longer responses are cut")
    system_prompt: str | None = Field(
        default=None, description="system turn of the chat template; null: the template's own"
    )
    prompt_template: str = Field(default="{question}", description="user turn; {question} is replaced")
    use_chat_template: bool = Field(default=True, description="false: the prompt is the bare text")
    shuffle: bool = Field(default=True, description="a new order every epoch, from runner.seed")
