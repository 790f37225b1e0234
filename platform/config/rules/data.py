"""Rules of `data`: the task, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from rl_platform.config.rules.rule import CHUNKS, TASK, Unread, embodied, reasoning, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.data import FILE_SUFFIXES
from rl_platform.errors import Problem

_KIND, _MINI = "data.task.type", "data.mini_batch_size"
_FILES = ("jsonl", "file")
_PROMPTS = (
    "task train_size val_size train_batch_size max_prompt_length max_response_length system_prompt prompt_template "
    "use_chat_template shuffle"
)


def rows_of_step(config: Config) -> int:
    """Rows of a rollout: sequences, or transitions of an embodied run."""
    return config.transitions if embodied(config) else config.data.train_batch_size * config.algorithm.group_size


def refused(config: Config) -> Iterator[Problem]:
    data = config.data
    if when(lambda: rows_of_step(config) % data.mini_batch_size):
        message = f"mini-batches of {data.mini_batch_size} do not divide the {rows_of_step(config)} "
        if embodied(config):
            chunks = f" / {CHUNKS}" if config.actor.model.num_action_chunks > 1 else ""
            yield Problem(_MINI, f"{message}transitions of env.num_envs * env.rollout_steps{chunks}")
        else:
            hint = "a step has data.train_batch_size * algorithm.group_size sequences"
            yield Problem(_MINI, f"{message}sequences of a step", hint=hint)
    if not when(lambda: reasoning(config)):
        return
    if when(lambda: data.task is None):
        message = "reasoning needs a task: where prompts and answers come from"
        yield Problem("data.task", message, hint="as data.task: {type: digits}")
    if when(lambda: data.task and data.task.type in _FILES and not data.task.path):
        yield Problem("data.task.path", f"type {data.task and data.task.type} needs the file to read")
    unknown_format = f"type file reads {', '.join(FILE_SUFFIXES)}, by the suffix"
    if when(lambda: data.task and data.task.type == "file" and not _is_readable(data.task.path)):
        yield Problem("data.task.path", unknown_format)
    if when(lambda: data.task and data.task.type == "file" and not _is_readable(data.task.val_path)):
        yield Problem("data.task.val_path", unknown_format)
    if when(lambda: data.task and data.task.type == "reasoning_gym" and not data.task.name):
        yield Problem("data.task.name", "type reasoning_gym needs the name of its data set", hint="as chain_sum")
    if when(
        lambda: (
            data.task
            and data.task.type == "digits"
            and data.task.params.get("operation") == "quotient"
            and config.rollout.multi_turn is None
        )
    ):
        message = "quotient is scored after a turn that asks the calculator, and rollout.multi_turn is null"
        yield Problem("data.task.params", message, hint="rollout.multi_turn: {tool: calculator}")
    if when(lambda: "{question}" not in data.prompt_template):
        yield Problem("data.prompt_template", "without {question} all prompts would be the same")


def _is_readable(path: str | None) -> bool:
    """True for a file of a format that `type: file` reads, and for none."""
    return not path or PurePath(path).suffix.lower() in FILE_SUFFIXES


def unread(config: Config) -> Iterator[Unread]:
    if when(lambda: embodied(config)):
        yield from unread_keys("data", _PROMPTS, "embodied training has no prompts", TASK)
    elif when(lambda: reasoning(config)):
        kind = when(lambda: config.data.task and config.data.task.type)
        if kind in (*_FILES, "digits"):
            yield Unread("data.task.name", "it belongs to data.task.type reasoning_gym", (_KIND,))
        if kind in _FILES:
            yield Unread("data.task.params", "it belongs to generated tasks", (_KIND,))
            yield Unread("data.train_size", "a file has the size it has; only generated tasks are sized", (_KIND,))
        elif kind:
            names = "path val_path prompt_column answer_column"
            yield from unread_keys("data.task", names, "it belongs to data.task.type jsonl or file", _KIND)
        if when(lambda: not config.data.use_chat_template):
            reason = "without data.use_chat_template there is no system turn"
            yield Unread("data.system_prompt", reason, ("data.use_chat_template",))
