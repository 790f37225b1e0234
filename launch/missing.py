"""Finds environments, files of questions or code, and folders of models that a config names and this machine lacks.

Imports neither torch nor a module of the user, so that the problems can be listed beside those of the schema. Not
covered: environments of other modules or interpreters, ids of hubs, the contents of files.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.descriptions import EnvDescription, find_spec
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import is_present

_CODE = re.compile(r"([^:]+\.py):[A-Za-z_]\w*")


def missing(config: Config) -> Iterator[Problem]:
    """Yields a problem for each missing environment, file, model and file of code that the config names."""
    yield from _absent(config)
    yield from _code(config.model_dump(mode="json"))


def check_present(config: Config) -> None:
    """Raises ConfigError with the problems of `missing`, except those of code, whose import raises its own."""
    if problems := list(_absent(config)):
        raise ConfigError(problems)


def _absent(config: Config) -> Iterator[Problem]:
    yield from unknown_env(config)
    if config.runner.task_type == "reasoning":
        yield from _files(config)
    if is_present("rl_platform.models.pretrained"):
        yield from _models(config)


def unknown_env(config: Config) -> Iterator[Problem]:
    """Yields the problem of an id that is not registered with Gymnasium."""
    description = EnvDescription.of(config.env)
    unchecked = description.python is not None or description.own_backend or ":" in description.id
    if config.runner.task_type != "embodied" or unchecked or _in_gymnasium(description.id):
        return
    from gymnasium.error import NamespaceNotFound

    try:
        find_spec(description)
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError | NamespaceNotFound):
            yield from error.problems


def _in_gymnasium(name: str) -> bool:
    """Returns whether Gymnasium itself registers `name`, from its source: its import takes longer than this check."""
    package = importlib.util.find_spec("gymnasium")
    source = Path(package.origin or "").parent / "envs" / "__init__.py" if package is not None else Path()
    return source.is_file() and f'id="{name}"' in source.read_text(encoding="utf-8")


def _files(config: Config) -> Iterator[Problem]:
    for key, task in config.data.tasks:
        for name, path in (("path", task.path), ("val_path", task.val_path)):
            if task.type in ("jsonl", "file") and path is not None and not Path(path).exists():
                rows = "one JSON object per line" if path.endswith(".jsonl") else "rows"
                columns = [column for column in (task.prompt_column, task.answer_column) if column is not None]
                fields = " and ".join(f"'{column}'" for column in columns)
                hint = f"a file of {rows} with the fields {fields}, see docs/reasoning.md#your-own-questions"
                yield Problem(f"{key}.{name}", "no such file", value=path, hint=hint)


def _code(config: dict[str, object]) -> Iterator[Problem]:
    for key, value in strings_of(config):
        if (match := _CODE.fullmatch(value)) and not Path(match[1]).exists():
            hint = "path/to/file.py:Name, from the folder where the run is started"
            yield Problem(key, "no such file", value=value, hint=hint)


def strings_of(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the key and the value of each string in nested dicts and lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from strings_of(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from strings_of(inner, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value


def _models(config: Config) -> Iterator[Problem]:
    from rl_platform.models.pretrained.model_folder import folder_problem

    for key, path in _model_paths(config):
        if (problem := folder_problem(path, key)) is not None:
            yield problem


def _model_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the keys and values of `path` of all models that the run loads."""
    models: list[tuple[str, Model | None]] = [("actor.model", config.actor.model)]
    if config.critic.use_critic_model:
        models.append(("critic.model", config.critic.model))
    if config.has_reference:
        models.append(("reference.model", config.reference.model))
    for key, model in models:
        if model is not None and model.path is not None:
            yield f"{key}.path", model.path
    for key, part in config.reward.parts:
        if part.model is not None and not part.asks_server:
            yield f"{key}.model.path", part.model.path
