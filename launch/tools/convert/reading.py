"""Reads a config of another system into dotted keys, and identifies its system."""

from __future__ import annotations

import fnmatch
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rl_platform.config.describe import is_known
from rl_platform.config.differences import flat
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.convert.conversion import System, rule_of
from rl_platform.launch.tools.convert.hydra import composed, parsed, resolved
from rl_platform.launch.tools.convert.nemo_rl import NEMO_RL
from rl_platform.launch.tools.convert.outcome import Unresolved, Value
from rl_platform.launch.tools.convert.python_script import script_arguments
from rl_platform.launch.tools.convert.rlinf import RLINF
from rl_platform.launch.tools.convert.sb3 import SB3, only_ppo, opened, read_blocks, read_model
from rl_platform.launch.tools.convert.shell import commands, known
from rl_platform.launch.tools.convert.trl import TRL
from rl_platform.launch.tools.convert.verl import VERL
from rl_platform.text_files import NotUTF8, text_of

SYSTEMS = {system.name: system for system in (RLINF, VERL, NEMO_RL, TRL, SB3)}
_LARGEST = 5_000_000  # bytes of a file, or of the settings in a saved model
_FORMS = {
    "rlinf": "a YAML file of Hydra with the sections runner, algorithm, actor and rollout",
    "verl": "a shell script that calls verl.trainer.main_ppo, or a YAML file with the section actor_rollout_ref",
    "nemo-rl": "a YAML file with the sections ppo or grpo, policy and loss_fn",
    "trl": "a YAML or JSON file of arguments, a shell script that passes them as --name value, or a Python script",
    "sb3": "a YAML file of the zoo, a mapping of PPO's arguments, a Python script, or a saved model (.zip)",
}


@dataclass(frozen=True)
class Foreign:
    """system: whose config it is; keys: dotted, as the file has them, with references filled in."""

    system: System
    keys: dict[str, Value]


def read(path: Path, name: str | None = None, env: str | None = None) -> Foreign:
    """Reads FILE as a config of the system `name`, or of the one it looks like.

    env: the block of a file of the zoo, or the environment of a saved model. Raises ConfigError.
    """
    if not path.is_file():
        raise ConfigError([Problem(str(path), "no such file" if not path.exists() else "not a file")])
    keys, lost = _keys(path, name, env)
    scores = {each.name: _score(each, keys) for each in SYSTEMS.values()}
    best = max(scores, key=lambda each: scores[each])
    likely = best if scores[best] > 0 else None
    chosen = name or likely
    if _is_ours(keys):
        raise ConfigError([Problem(str(path), "a config of this platform already", hint=f"platform-launch {path}")])
    if chosen is None or scores[chosen] == 0:
        which = SYSTEMS[name].title if name else "any of " + ", ".join(each.title for each in SYSTEMS.values())
        hint = (
            f"it looks like {SYSTEMS[likely].title}: --from {likely}"
            if likely
            else "; ".join([_FORMS[name]] if name else [f"--from {each}: {form}" for each, form in _FORMS.items()])
        )
        seen = ", ".join([*keys][:5]) or "no keys"
        raise ConfigError([Problem(str(path), f"not a config of {which}", value=seen, hint=hint)])
    system = SYSTEMS[chosen]
    if system is SB3:
        only_ppo(path, keys)
    values = resolved(flat(_nested(keys), whole=system.leaves))
    for entry in lost:
        why = "the file is not beside this one, so its keys are missing"
        if rule_of(system, "defaults") is None:
            values[f"defaults: {entry}"] = Unresolved(entry, why)
    return Foreign(system, values)


def _keys(path: Path, name: str | None, env: str | None) -> tuple[dict[str, Value], list[str]]:
    """Dotted keys of the file, unresolved, and the `defaults` that are not there."""
    if path.stat().st_size > _LARGEST and not zipfile.is_zipfile(path):
        raise ConfigError([Problem(str(path), f"more than {_LARGEST} bytes: not a config")])
    if zipfile.is_zipfile(path):
        return read_model(path, env, _LARGEST), []
    if path.suffix in (".yaml", ".yml"):
        tree, lost = composed(path)
        tree = read_blocks(path, tree, env) if name in (None, "sb3") else tree
        return flat(tree), lost
    try:
        text = text_of(path.read_bytes(), path)
    except NotUTF8 as error:
        message = f"{error}; and not a saved model (.zip)"
        raise ConfigError([Problem(f"{path}:{error.line}", message, hint=error.hint)]) from error
    if path.suffix == ".json":
        return _json(path, text), []
    if path.suffix == ".py":
        return opened(script_arguments(path, text)), []
    return _arguments(path, text), []


def _json(path: Path, text: str) -> dict[str, Value]:
    try:
        tree = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(path), f"not readable as JSON: {error}")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), "holds no keys", allowed="a JSON object")])
    return flat(tree)


def _without_repetition(pairs: Sequence[tuple[str, Value]]) -> dict[str, Value]:
    """Returns the values of a JSON object. Raises ValueError for a key that appears twice."""
    values = dict(pairs)
    for name, _ in pairs if len(values) < len(pairs) else ():
        if [key for key, _ in pairs].count(name) > 1:
            raise ValueError(f"the key {name!r} appears twice: remove one of the two")
    return values


def _arguments(path: Path, text: str) -> dict[str, Value]:
    """Returns the overrides of verl, or the --arguments of TRL, from the training command of a script."""
    calls = [words for words in commands(text) if any(_is_training(word) for word in words)]
    if not calls:
        message = "no training command: neither verl.trainer.main_ppo nor a Python script with --arguments"
        raise ConfigError([Problem(str(path), message, hint=f"{_FORMS['verl']}; {_FORMS['trl']}")])
    trained = [words for words in calls if any(word.endswith(("main_ppo", "main_ppo.py")) for word in words)]
    return _overrides(trained[0]) if trained else _options(calls[0])


def _is_training(word: str) -> bool:
    return word.endswith(("main_ppo", ".py")) or word == "trl"


def _scalar(word: str) -> Value:
    """Returns the value of an argument. A variable that the script does not set stays unresolved."""
    text = known(word)
    if isinstance(text, Unresolved):
        return text
    try:
        value = parsed(text)
    except yaml.YAMLError:
        return text
    return text if value is None and text not in ("null", "~", "None") else value


def _overrides(words: Sequence[str]) -> dict[str, Value]:
    """Hydra's overrides, and `config_name`: the trainer's config that --config-name selects."""
    matches = (re.fullmatch(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", word, re.DOTALL) for word in words)
    keys = {each[1]: _scalar(each[2]) for each in matches if each}
    named = re.search(r"--config-name[= ]'?([\w.-]+)", " ".join(words))
    return {**keys, **({"config_name": named[1]} if named else {})}


def _options(words: Sequence[str]) -> dict[str, Value]:
    """--name value, --name=value, --name for true, and several values as a list. The launcher's precede the script."""
    script = next(index for index, word in enumerate(words) if _is_training(word))
    keys: dict[str, Value] = {}
    for prefix, part in (("launcher.", words[:script]), ("", words[script + 1 :])):
        name = ""
        for word in part:
            if match := re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL):
                name = prefix + match[1].replace("-", "_")
                keys[name] = True if match[2] is None else _scalar(match[2])
            elif name:
                value = _scalar(word)
                before = keys[name]
                keys[name] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    return keys


def _score(system: System, keys: Mapping[str, Value]) -> float:
    """Returns the share of keys in the system's table, times the share of its marks that are present."""
    marks = sum(any(fnmatch.fnmatchcase(key, mark) for key in keys) for mark in system.marks)
    if not keys or not marks:
        return 0.0
    return marks / len(system.marks) * sum(rule_of(system, key) is not None for key in keys) / len(keys)


def _is_ours(keys: Mapping[str, Value]) -> bool:
    """Returns whether the loader supports every key."""
    return "runner.task_type" in keys and all(is_known(key) for key in keys if not key.startswith("cluster."))


def _nested(keys: Mapping[str, Value]) -> dict[str, Value]:
    tree: dict[str, Value] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            step = inner.setdefault(section, {})
            if not isinstance(step, dict):
                raise ConfigError([Problem(key, f"{section} is a value and a section")])
            inner = step
        inner[name] = value
    return tree
