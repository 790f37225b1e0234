"""Reads the arguments in a Python script that trains with TRL or Stable-Baselines3, without running it.

Values may be literals, or names that the script assigns once to a literal. Not covered: computed values, and functions
that change a dataset or an environment.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.convert.outcome import Unresolved, Value

_TRL, _SB3 = ("PPOConfig", "GRPOConfig"), ("PPO",)
Calls = Mapping[str, list[ast.Call]]


def script_arguments(path: Path, text: str) -> dict[str, Value]:
    """Returns the keys of the only trainer in `text`, named as in a file of arguments.

    Raises ConfigError if there is no trainer, or several.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([Problem(str(path), f"not readable as Python: {error}")]) from error
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(_name(node.func), []).append(node)
    known = _constants(tree)
    trainers = [call for name in (*_TRL, *_SB3) for call in calls.get(name, ())]
    if len(trainers) != 1:
        message = f"{'no' if not trainers else len(trainers)} calls of {', '.join((*_TRL, *_SB3))}"
        hint = "the arguments as YAML or JSON; a model that Stable-Baselines3 saved (.zip)"
        raise ConfigError([Problem(str(path), message, allowed="one trainer with its arguments", hint=hint)])
    read = _of_trl if _name(trainers[0].func) in _TRL else _of_sb3
    return read(trainers[0], calls, known)


def _of_trl(config: ast.Call, calls: Calls, known: Mapping[str, ast.expr]) -> dict[str, Value]:
    """Returns the arguments of the config, and model and dataset under the names of TRL's own scripts."""
    keys = _keywords(config, known)
    for trainer in calls.get("GRPOTrainer", ()):
        given = _keywords(trainer, known)
        keys |= {"model_name_or_path": given["model"]} if "model" in given else {}
        if "reward_funcs" in given:
            keys["reward_funcs"] = next(
                ast.unparse(word.value) for word in trainer.keywords if word.arg == "reward_funcs"
            )
    if len(loads := calls.get("load_dataset", [])) == 1:
        names = dict(zip(("dataset_name", "dataset_config"), loads[0].args, strict=False))
        keys |= {name: _value(each, known) for name, each in names.items()}
        given = _keywords(loads[0], known)
        if isinstance(files := given.get("data_files"), str):  # read by one of the loaders json, csv and parquet
            keys["data_files"] = files
        split = given.get("split")
        if split is not None and not (split == "train" and "data_files" in keys):
            keys["dataset_train_split"] = split
    return keys


def _of_sb3(trainer: ast.Call, calls: Calls, known: Mapping[str, ast.expr]) -> dict[str, Value]:
    """Returns the arguments of PPO, and environment, number of environments, length and normalisation as in the zoo."""
    given = dict(zip(("policy", "env"), trainer.args, strict=False))
    given |= {word.arg: word.value for word in trainer.keywords if word.arg is not None}
    keys = _environment(_resolved(given.pop("env", ast.Constant(None)), known), calls, known)
    keys |= {name: _value(each, known) for name, each in given.items()}
    if "policy_kwargs" in given:
        keys["policy_kwargs"] = ast.unparse(_resolved(given["policy_kwargs"], known))
    if len(learned := calls.get("learn", [])) == 1:
        length = _keywords(learned[0], known).get("total_timesteps")
        keys["n_timesteps"] = _value(learned[0].args[0], known) if learned[0].args else length
    if wrapped := calls.get("VecNormalize"):
        changed = wrapped[0].keywords
        keys["normalize"] = Unresolved(ast.unparse(wrapped[0]), "see env.normalize_observations") if changed else True
    return keys


def _environment(env: ast.expr, calls: Calls, known: Mapping[str, ast.expr]) -> dict[str, Value]:
    """Returns id, number and arguments of the environments, from PPO's argument and the only call that makes one."""
    if isinstance(env, ast.Constant):
        return {"env": _value(env, known)}
    made = [*calls.get("make_vec_env", ()), *calls.get("make", ())]
    if len(made) != 1 or not made[0].args:
        return {"env": Unresolved(ast.unparse(env), "the script makes it")}
    keys = dict(zip(("env", "n_envs"), (_value(each, known) for each in made[0].args), strict=False))
    given = _keywords(made[0], known)
    if _name(made[0].func) == "make_vec_env":
        return keys | given
    if several := [*calls.get("DummyVecEnv", ()), *calls.get("SubprocVecEnv", ())]:
        keys["n_envs"] = Unresolved(ast.unparse(several[0]), "the script makes them")
    return keys | ({"env_kwargs": given} if given else {})


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the values of the names that the module assigns once."""
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and len(node.targets) == 1]
    pairs = ((node.targets[0], node.value) for node in assigned)
    return {name.id: value for name, value in pairs if isinstance(name, ast.Name) and stored.count(name.id) == 1}


def _keywords(call: ast.Call, known: Mapping[str, ast.expr]) -> dict[str, Value]:
    return {word.arg: _value(word.value, known) for word in call.keywords if word.arg is not None}


def _resolved(node: ast.expr, known: Mapping[str, ast.expr]) -> ast.expr:
    return known.get(node.id, node) if isinstance(node, ast.Name) else node


def _value(node: ast.expr, known: Mapping[str, ast.expr]) -> Value:
    try:
        value: Value = ast.literal_eval(_resolved(node, known))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Unresolved(ast.unparse(node), "the script computes it")
    return [*value] if isinstance(value, tuple | set) else value
