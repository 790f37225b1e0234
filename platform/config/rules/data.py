"""Rules of `data`: the task, and the sizes of batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import PurePath

from rl_platform.config.rules.rule import CHUNKS, TASK, Unread, embodied, reasoning, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.data import FILE_SUFFIXES, QuestionTask, Source
from rl_platform.config.schema.reward import VERIFIERS, Scoring
from rl_platform.errors import Problem

_KIND, _MINI = "data.task.type", "data.mini_batch_size"
_FILES = ("jsonl", "file")
_STORED = (*_FILES, "dataset")
_PROMPTS = (
    "task sources train_size val_size train_batch_size max_prompt_length max_response_length "
    "expected_response_length system_prompt prompt_template use_chat_template shuffle"
)


def divisor_of(rows: int, size: int) -> str:
    """Returns the allowed sizes in words, with the divisors of `rows` next to `size`."""
    tried = 10_000  # sizes on either side
    below = next((each for each in range(size, max(size - tried, 0), -1) if rows % each == 0), None)
    above = next((each for each in range(size, min(size + tried, rows + 1)) if rows % each == 0), None)
    near = " or ".join(str(each) for each in (below, above) if each is not None)
    return f"a divisor of {rows}" + (f", as {near}" if near else "")


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `data`."""
    data = config.data
    if when(lambda: config.rows_per_step % data.mini_batch_size):
        rows, size = config.rows_per_step, data.mini_batch_size
        message, allowed = f"mini-batches of {size} do not divide the {rows} ", divisor_of(rows, size)
        if embodied(config):
            chunks = f" / {CHUNKS}" if config.actor.model.num_action_chunks > 1 else ""
            yield Problem(_MINI, f"{message}transitions of env.num_envs * env.rollout_steps{chunks}", allowed=allowed)
        else:
            hint = "a step has data.train_batch_size * algorithm.group_size sequences"
            yield Problem(_MINI, f"{message}sequences of a step", allowed=allowed, hint=hint)
    if not when(lambda: reasoning(config)):
        return
    if when(lambda: (data.expected_response_length or 0) > data.max_response_length):
        message = f"responses are truncated at {data.max_response_length} tokens (data.max_response_length)"
        yield Problem("data.expected_response_length", message, allowed=f"1 to {data.max_response_length}")
    if when(lambda: not data.tasks):
        message = "reasoning needs a source of prompts and answers"
        yield Problem("data.task", message, hint="for example data.task: {type: digits}, or data.sources")
    for key, task in when(lambda: data.tasks) or ():
        yield from _task(config, key, task)
    yield from _sources(when(lambda: data.sources) or [])
    if when(lambda: "{question}" not in data.prompt_template):
        yield Problem("data.prompt_template", "the template lacks {question}, so all prompts would be equal")


def _is_readable(path: str | None) -> bool:
    """Returns True for a file of a format that `type: file` reads, and for none."""
    return not path or PurePath(path).suffix.lower() in FILE_SUFFIXES


def _runs_programs(part: Scoring) -> bool:
    return part.type == "code"


def _task(config: Config, key: str, task: QuestionTask) -> Iterator[Problem]:
    kind = when(lambda: task.type)
    if kind in _STORED and when(lambda: not task.path):
        yield Problem(f"{key}.path", f"type {kind} needs a {'dataset' if kind == 'dataset' else 'file'}")
    unknown_format = f"type file reads {', '.join(FILE_SUFFIXES)}, by the suffix"
    for name in ("path", "val_path"):
        if kind == "file" and not _is_readable(when(partial(getattr, task, name))):
            yield Problem(f"{key}.{name}", unknown_format)
    if kind == "reasoning_gym" and when(lambda: not task.name):
        yield Problem(f"{key}.name", "type reasoning_gym needs the name of its data set", hint="for example chain_sum")
    programs = [at for at, part in when(lambda: config.reward.parts) or () if when(partial(_runs_programs, part))]
    if programs and kind is not None and kind not in _STORED:
        message = f"{programs[0]}.type code reads the column tests of stored questions, and {kind} has none"
        yield Problem(f"{key}.type", message, allowed=", ".join(_STORED))
    turns = when(lambda: task.params.get("operation") == "quotient" and config.rollout.multi_turn is None)
    if kind == "digits" and turns:
        message = "the operation quotient needs the calculator, and rollout.multi_turn is null"
        yield Problem(f"{key}.params", message, hint="rollout.multi_turn: {tool: calculator}")
    if kind in _STORED and when(lambda: task.answer_column is None):
        comparing = [at for at, part in when(lambda: config.reward.parts) or () if part.type in VERIFIERS]
        if comparing:
            message = f"{comparing[0]} compares responses with answers, and null says that there are none"
            yield Problem(f"{key}.answer_column", message, hint="a column, or a reward of another type")


def _sources(sources: list[Source]) -> Iterator[Problem]:
    weights, sizes = ([when(partial(getattr, source, key)) for source in sources] for key in ("weight", "val_size"))
    labels = [when(partial(getattr, source, "label")) for source in sources]
    for index, label in enumerate(labels):
        if label is not None and label in labels[:index]:
            message = f"another source is named {label}, and names of metrics contain it"
            yield Problem(f"data.sources[{index}].label", message)
        if weights[index] == 0 and sizes[index] == 0:
            message = "the source is neither trained on (weight 0) nor validated"
            yield Problem(f"data.sources[{index}].val_size", message)
    if sources and not any(weight != 0 for weight in weights):
        yield Problem("data.sources", "all weights are 0, so there is nothing to train on")
    if sources and not any(size != 0 for size in sizes):
        yield Problem("data.sources", "all values of val_size are 0, so there is nothing to validate on")


def unread(config: Config) -> Iterator[Unread]:
    """Yields the keys of `data` that this config does not read, each with the reason."""
    if when(lambda: embodied(config)):
        yield from unread_keys("data", _PROMPTS, "embodied training has no prompts", TASK)
    elif when(lambda: reasoning(config)):
        if when(lambda: config.data.sources):
            yield Unread("data.task", "data.sources replaces it", ("data.sources",))
        tasks = when(lambda: config.data.tasks) or []
        for key, task in tasks:
            yield from _unread_by(key, task)
        only_stored = when(lambda: all(task.type in _STORED for _, task in tasks))
        if tasks and only_stored:
            switch = (_KIND, "data.sources")
            yield Unread("data.train_size", "it belongs to generated tasks; all questions of a file are used", switch)
        if when(lambda: not config.data.use_chat_template):
            reason = "data.use_chat_template is off, so there is no system message"
            yield Unread("data.system_prompt", reason, ("data.use_chat_template",))


def _unread_by(key: str, task: QuestionTask) -> Iterator[Unread]:
    """Yields the keys of a source that its type does not read. A list is inherited as a whole, so its items bind no
    keys."""
    kind, switches = when(lambda: task.type), (_KIND,) if key == "data.task" else ()
    if kind is None:
        return

    def unread_names(names: str, reason: str) -> Iterator[Unread]:
        return unread_keys(key, names, reason, *switches)

    if kind not in ("reasoning_gym", "dataset"):
        yield from unread_names("name", "it belongs to type reasoning_gym or dataset")
    if kind in _STORED:
        yield from unread_names("params", "it belongs to generated tasks")
    else:
        yield from unread_names("path prompt_column answer_column", "it belongs to type jsonl, file or dataset")
    validates = not isinstance(task, Source) or when(lambda: task.weight > 0 and task.val_size != 0)
    if kind not in _FILES:
        see = ": see val_split" if kind == "dataset" else ""
        yield from unread_names("val_path", f"it belongs to type jsonl or file{see}")
    if kind != "dataset":
        yield from unread_names("split val_split", "it belongs to type dataset")
    elif not validates:
        yield from unread_names("val_split", "the source is trained on or validated, not both")
    if kind in _FILES and not validates:
        yield from unread_names("val_path", "the source is trained on or validated, not both")
