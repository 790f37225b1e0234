"""Finds what a config names and this machine lacks: environments, interpreters, folders of models and tokenizers, and
files of questions, demonstrations or code.

Imports neither torch nor a module of the user, so that the problems can be listed beside those of the schema. Not
covered: environments of other modules or interpreters, ids of hubs, the contents of files. `runner.resume` is checked
with the schema.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rl_platform.config.layers import strings_of
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Model
from rl_platform.config.schema.reward import RewardModel
from rl_platform.envs.embodied.descriptions import EnvDescription, find_spec
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import is_present

_FILE = re.compile(r"([^:]+\.py):[A-Za-z_]\w*")
_MODULE = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAMES_CODE = re.compile(  # keys of `extensions.USES`; other keys may hold such a text with another meaning
    r"actor\.model\.type|(env|rollout)\.backend|algorithm\.(adv_type|policy_loss|sample_filter|dynamic_sampling\.filter)"
    r"|reward(\.\w+)*(\[\d+\])?\.type|rollout\.multi_turn\.tool|rollout\.agent(\.\w+)*(\[\d+\])?\.(type|function)"
    r"|runner\.(callbacks|logger_backends)\[\d+\]"
)


def missing(config: Config) -> Iterator[Problem]:
    """Yields a problem for each thing that the config names and this machine lacks."""
    yield from _absent(config)
    python = config.rollout.vllm.python
    if config.rollout.backend == "vllm" and python is not None and shutil.which(python) is None:
        yield Problem("rollout.vllm.python", "no such interpreter", value=python, hint="as path/to/venv/bin/python")
    yield from _code(config.model_dump(mode="json"))


def check_present(config: Config) -> None:
    """Raises ConfigError with the problems of `missing`, except those of code and vLLM, whose use raises its own."""
    if problems := list(_absent(config)):
        raise ConfigError(problems)


def _absent(config: Config) -> Iterator[Problem]:
    if config.runner.task_type == "reasoning":
        yield from _files(config)
    else:
        yield from unknown_env(config)
        yield from _simulation(config)
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
            if path is None or Path(path).exists():
                continue
            if task.type in ("jsonl", "file"):
                rows = "one JSON object per line" if path.endswith(".jsonl") else "rows"
                columns = [column for column in (task.prompt_column, task.answer_column) if column is not None]
                fields = " and ".join(f"'{column}'" for column in columns)
                hint = f"a file of {rows} with the fields {fields}, see docs/reasoning.md#your-own-questions"
                if not Path(path).is_absolute():
                    hint += f"; relative paths begin where the run is started, here {os.getcwd()}"
                yield Problem(f"{key}.{name}", "no such file", value=path, hint=hint)
            elif task.type == "dataset" and (path.startswith((".", "/", "~")) or path.count("/") > 1):
                hint = "a folder of datasets.load_dataset(...).save_to_disk(FOLDER), or an id of the Hugging Face hub"
                yield Problem(f"{key}.{name}", "no such folder", value=path, hint=hint)


def _simulation(config: Config) -> Iterator[Problem]:
    if config.runner.warm_start is not None and is_present("rl_platform.components.demonstrations"):
        from rl_platform.components.demonstrations.demonstration_files import absent

        if (problem := absent(config.runner.warm_start)) is not None:
            yield problem
    if (problem := absent_interpreter(config)) is not None:
        yield problem


def names_nearly_one(config: Config) -> bool:
    """Returns whether `env.python`, which this machine lacks, is nearly the name of an environment."""
    from rl_platform.envs.embodied.processes.interpreter import meant

    return config.env.python is not None and meant(config.env.python) is not None


def absent_interpreter(config: Config) -> Problem | None:
    """Returns the problem of an `env.python` that this machine lacks."""
    if config.env.python is None or not is_present("rl_platform.envs.embodied.processes"):
        return None
    from rl_platform.envs.embodied.processes.interpreter import executable

    try:
        executable(config.env.python, config.env.name)
    except ConfigError as error:
        return error.problems[0]
    return None


def _code(config: dict[str, object]) -> Iterator[Problem]:
    for key, value in strings_of(config):
        if (file := _FILE.fullmatch(value)) and not Path(file[1]).exists():
            hint = "path/to/file.py:Name, from the folder where the run is started"
            yield Problem(key, "no such file", value=value, hint=hint)
        elif _NAMES_CODE.fullmatch(key) and (module := _MODULE.fullmatch(value)) and not _importable(module[1]):
            hint = "module:Name of an installed module or one of this folder, or path/to/file.py:Name"
            yield Problem(key, f"there is no module {module[1]}", value=value, hint=hint)


def _importable(module: str) -> bool:
    """Returns whether a module without dots is installed, or in the folder where the run is started."""
    here = Path(os.getcwd(), module)
    return here.is_dir() or here.with_suffix(".py").is_file() or importlib.util.find_spec(module) is not None


def _models(config: Config) -> Iterator[Problem]:
    from rl_platform.models.pretrained.model_folder import folder_problem, tokenizer_problem

    for key, model in _loaded_models(config):
        problems = [folder_problem(model.path, f"{key}.path")] if model.path is not None else []
        if model.tokenizer not in (None, "bytes"):
            problems.append(tokenizer_problem(model.tokenizer, f"{key}.tokenizer"))
        yield from filter(None, problems)


def _loaded_models(config: Config) -> Iterator[tuple[str, Model | RewardModel]]:
    """Yields the keys and sections of all models that the run loads."""
    models: list[tuple[str, Model | None]] = [("actor.model", config.actor.model)]
    if config.critic.use_critic_model:
        models.append(("critic.model", config.critic.model))
    if config.has_reference:
        models.append(("reference.model", config.reference.model))
    yield from ((key, model) for key, model in models if model is not None)
    for key, part in config.reward.parts:
        if part.model is not None and not part.asks_server:
            yield f"{key}.model", part.model
