"""The `data` section: the task and the batch sizes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.schema.section import Section, UserPath, key

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class QuestionTask(Section):
    """`data.task`: the source of prompts and answers."""

    type: Literal["reasoning_gym", "jsonl", "file", "dataset", "digits"] = key(
        "reasoning_gym",
        "source of the questions; file: .jsonl, .json, .csv or .parquet, by the suffix; dataset: of Hugging Face",
    )
    name: str | None = key(
        None, "reasoning_gym: name of the data set; dataset: config of the dataset, null: the default one"
    )
    params: dict[str, object] = Field(
        default_factory=dict, description="reasoning_gym, digits: parameters of the generator"
    )
    path: UserPath | None = key(
        None, "jsonl, file: training file; dataset: folder, as of save_to_disk, or id of the Hugging Face hub"
    )
    val_path: UserPath | None = key(
        None, "jsonl, file: validation file; null: the last data.val_size questions of path"
    )
    split: str | None = key(None, "dataset: training split; null: train, or all of a folder without splits")
    val_split: str | None = key(None, "dataset: validation split; null: the last data.val_size questions of split")
    prompt_column: str = key(
        "question", "jsonl, file, dataset: field of the prompt, a text or a list of messages; dots for nested fields"
    )
    answer_column: str | None = key(
        "answer", "jsonl, file, dataset: field of the expected answer; null: there are no answers"
    )


class Source(QuestionTask):
    """`data.sources[]`: one of several sources of questions."""

    label: str = Field(pattern=r"^[\w.-]+$", description="part of the names of its metrics, as `val/<label>/accuracy`")
    weight: float = key(1.0, "share of the prompts, relative to the other sources; 0: validation only", ge=0)
    val_size: int | None = key(None, "number of its validation prompts, 0: none; null: data.val_size", ge=0)


class Data(Section):
    """`data`: the task and the batch sizes."""

    task: QuestionTask | None = key(None, "reasoning: source of the questions; required without data.sources")
    sources: list[Source] = Field(
        default_factory=list, description="reasoning: several sources, mixed by weight, each with its own validation"
    )
    train_size: int = key(10_000, "reasoning_gym, digits: number of distinct training prompts, of each source", ge=1)
    val_size: int = key(200, "number of validation prompts, of each source; none of them is a training prompt", ge=1)
    train_batch_size: int = key(64, "reasoning: prompts per step", ge=1)
    mini_batch_size: int = key(64, "rows per optimizer step, over all ranks (embodied: transitions)", ge=1)
    max_prompt_length: int = key(256, "largest number of tokens; longer prompts are skipped and counted", ge=1)
    max_response_length: int = key(64, "largest number of tokens; longer responses are truncated", ge=1)
    expected_response_length: int | None = key(
        None, "mean tokens of a response, for --plan; null: as measured, or the largest number", ge=1
    )
    system_prompt: str | None = key(None, "system message of the chat template; null: the template's default")
    prompt_template: str = key("{question}", "text of the user message; {question} is replaced")
    use_chat_template: bool = key(True, "format prompts by the tokenizer's chat template; false: plain text")
    shuffle: bool = key(True, "shuffle the prompts anew in every epoch, from runner.seed")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.max_prompt_length + self.max_response_length

    @property
    def tasks(self) -> list[tuple[str, QuestionTask]]:
        """Every source of questions with its key."""
        if self.sources:
            return [(f"data.sources[{index}]", source) for index, source in enumerate(self.sources)]
        return [] if self.task is None else [("data.task", self.task)]

    @property
    def validation_prompts(self) -> int:
        """Validation prompts of all sources, at most."""
        return sum(self.validation_size(task) for _, task in self.tasks)

    def validation_size(self, task: QuestionTask) -> int:
        """Returns the number of validation prompts of a source, at most."""
        own = task.val_size if isinstance(task, Source) else None
        return self.val_size if own is None else own
