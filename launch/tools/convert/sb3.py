"""PPO of Stable-Baselines3: what is computed of the hyperparameters of its zoo, PPO's arguments, or a saved model."""

from __future__ import annotations

import ast
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    ForeignConfig,
    Outcome,
    Table,
    Unresolved,
    Value,
    detail,
    number,
    same,
    unknown,
    untranslated,
    write,
)
from rl_platform.suggest import nearest

_SAVED_APART = "not in this file"
_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "silu": "silu", "elu": "elu"}
_OF_SAVED_MODELS = (
    "policy_class num_timesteps _total_timesteps _num_timesteps_at_start start_time _last_obs _last_episode_starts "
    "_last_original_obs _episode_num _current_progress_remaining _stats_window_size ep_info_buffer ep_success_buffer "
    "_n_updates _custom_logger observation_space action_space action_noise lr_schedule rollout_buffer_class "
    "rollout_buffer_kwargs sde_sample_freq _logger"
)
_STATE = _OF_SAVED_MODELS.split()
_OTHERS = (
    "buffer_size",
    "learning_starts",
    "tau",
    "train_freq",
    "use_rms_prop",
    "target_update_interval",
    "cg_max_steps",
)


def _linear(value: Value) -> float | None:
    """Returns the start of a schedule that falls linearly to 0: `lin_0.001`, or as a saved model names it."""
    if not isinstance(value, str):
        return None
    match = re.fullmatch(r"lin_([\d.eE+-]+)", value) or re.fullmatch(
        r"LinearSchedule\(start=([\d.eE+-]+), end=0(?:\.0)?, end_fraction=1(?:\.0)?\)", value
    )
    return float(match[1]) if match else None


def _learning_rate(value: Value, _: ForeignConfig) -> Outcome:
    if (start := _linear(value)) is not None:
        return write({"actor.optim.lr": start, "actor.optim.lr_schedule": "linear"}, "from it to 0")
    if isinstance(value, int | float):
        return write({"actor.optim.lr": value})
    return untranslated("a schedule of the learning rate: constant, linear or cosine here")


def _clip_range(value: Value, _: ForeignConfig) -> Outcome:
    keys = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    if (start := _linear(value)) is not None:
        return untranslated(
            f"the clip range is constant here: it stays at its start, {start:g}", dict.fromkeys(keys, start)
        )
    if isinstance(value, int | float):
        return write(dict.fromkeys(keys, value))
    return untranslated("the clip range is constant here")


def _value_clip(value: Value, _: ForeignConfig) -> Outcome:
    if value is None:
        return same("not set")
    if not isinstance(value, int | float):
        return untranslated("the clip range is constant here")
    return write({"algorithm.value_clip": value}, "the larger of both losses here, the clipped one there")


def _value_coefficient(value: Value, _: ForeignConfig) -> Outcome:
    return write(
        {"algorithm.value_loss_scale": 2 * number(value)}, "half the squared error here, the squared error there"
    )


def _timesteps(value: Value, source: ForeignConfig) -> Outcome:
    rows = _rows(source)
    return write({"runner.max_steps": math.ceil(number(value) / rows)}, f"steps of {rows} transitions")


def _rows(source: ForeignConfig) -> int | float:
    """Transitions of a rollout."""
    return source.number("n_envs") * source.number("n_steps")


def _batch_size(value: Value, source: ForeignConfig) -> Outcome:
    rows, size = _rows(source), number(value)
    if size > rows:
        return write({"data.mini_batch_size": rows}, f"a rollout has {rows} transitions")
    if rows % size:
        smaller = max(each for each in range(1, int(size) + 1) if rows % each == 0)
        why = f"the last mini-batch of {rows} transitions is smaller there; the nearest size that divides is {smaller}"
        return untranslated(why, {"data.mini_batch_size": smaller})
    return write({"data.mini_batch_size": size})


def _policy(value: Value, _: ForeignConfig) -> Outcome:
    values: dict[str, Value] = {
        "runner.task_type": "embodied",
        "algorithm.adv_type": "gae",
        "algorithm.loss_type": "actor_critic",
        "cluster.component_placement": {"actor_critic,env,rollout": "all"},
    }
    if value == "MlpPolicy":
        return write({**values, "actor.model.type": "mlp"}, "policy and value head share their layers here")
    if value == "CnnPolicy":
        return write({**values, "actor.model.type": "cnn", "actor.model.activation": "relu"}, "see actor.model.cnn")
    if value == "MultiInputPolicy":
        return write({**values, "actor.model.type": "mlp"}, "parts of a Dict are joined; images among them are refused")
    return untranslated(f"{value} has no counterpart; known: MlpPolicy, CnnPolicy, MultiInputPolicy", values)


def _normalize(value: Value, source: ForeignConfig) -> Outcome:
    """VecNormalize: both by default; a mapping of its arguments may switch one off."""
    if value == _SAVED_APART:
        off_here = dict.fromkeys(("env.normalize_observations", "env.normalize_rewards"), False)
        return untranslated("VecNormalize is saved in a file of its own", off_here)
    given = literal(value) if isinstance(value, str) else value
    options = {"norm_obs": given, "norm_reward": given} if isinstance(given, bool) else given
    if not isinstance(options, Mapping):
        raise TypeError
    lost = sorted({*options} - {"norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma"})
    values = {
        "env.normalize_observations": options.get("norm_obs", True),
        "env.normalize_rewards": options.get("norm_reward", True),
    }
    values |= {f"env.{ours}": options[name] for name, ours in _CLIPS.items() if name in options}
    if lost:
        return untranslated(f"{', '.join(lost)}: see env.normalize_observations", values)
    return write(values)


_CLIPS = {"clip_obs": "clip_observations", "clip_reward": "clip_rewards"}


def _network(value: Value, _: ForeignConfig) -> Outcome:
    if value is None:
        return same("not set")
    if isinstance(value, Mapping):
        policy, values = value.get("pi", []), value.get("vf", [])
        if policy != values:
            return untranslated("policy and value head share their layers: one list")
        value = policy
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        return untranslated("a list of widths")
    return write({"actor.model.hidden_sizes": value}, "shared by policy and value head")


def _activation(value: Value, _: ForeignConfig) -> Outcome:
    name = re.split(r"[.']", str(value).rstrip("'>"))[-1].lower()
    if name not in _ACTIVATIONS:
        return unknown(value, _ACTIVATIONS)
    return write({"actor.model.activation": _ACTIVATIONS[name]})


def _frame_stack(value: Value, _: ForeignConfig) -> Outcome:
    if value in (None, 1):
        return same("no stack")
    return untranslated("frames of MuJoCo's images are stacked by env.pixels.frame_stack; wrap others")


RULES: Table = {
    "policy": _policy,
    "batch_size": _batch_size,
    "n_timesteps": _timesteps,
    "total_timesteps": _timesteps,
    "learning_rate": _learning_rate,
    "clip_range": _clip_range,
    "clip_range_vf": _value_clip,
    "vf_coef": _value_coefficient,
    "normalize": _normalize,
    "policy_kwargs.net_arch": _network,
    "policy_kwargs.activation_fn": _activation,
    "frame_stack": _frame_stack,
    **dict.fromkeys(_STATE, detail("state of the training, no setting")),
}
SB3 = System(
    "sb3",
    "Stable-Baselines3",
    ("n_steps", "gae_lambda", "ent_coef", "n_epochs", "n_timesteps"),
    RULES,
    leaves=("policy_kwargs.net_arch", "normalize", "env_wrapper"),
)


def literal(text: str) -> Value:
    """Returns the value of `dict(a=1, b=nn.ReLU)`, `{'a': 1}` and the like. Names stay texts. Raises ValueError."""
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Value:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {each.arg: _value(each.value) for each in node.keywords if each.arg}
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node)
    constant: Value = ast.literal_eval(node)
    return constant


def read_blocks(path: Path, tree: dict[str, Value], env: str | None) -> dict[str, Value]:
    """Returns the arguments in a file of the zoo: those of the block `env`, or of the only one. Other files stay
    unchanged."""
    blocks = {str(name): block for name, block in tree.items() if isinstance(block, Mapping) and _is_block(block)}
    if not blocks:
        return {**opened(tree), **({"env": env} if env else {})} if _is_block(tree) else tree
    names = [name for name in blocks if name not in ("default", "atari")]
    if env is None and len(names) > 1:
        message = f"the file has settings of {len(names)} environments"
        raise ConfigError([Problem(str(path), message, allowed=", ".join(names), hint=f"--env {names[0]}")])
    chosen = env if env is not None else names[0] if names else next(iter(blocks))
    if chosen not in blocks:
        near, message = nearest(chosen, blocks), "the file has no such block"
        hint = f"--env {near}" if near else ""
        raise ConfigError([Problem(str(path), message, value=chosen, allowed=", ".join(blocks), hint=hint)])
    return {"env": chosen, **opened(blocks[chosen])}


def only_ppo(path: Path, keys: Mapping[str, Value]) -> None:
    """Raises ConfigError if the settings belong to another algorithm."""
    if others := [key for key in _OTHERS if key in keys]:
        message = "the settings of another algorithm of Stable-Baselines3"
        raise ConfigError([Problem(str(path), message, value=", ".join(others), allowed="PPO")])


def _is_block(block: Mapping[str, Value]) -> bool:
    return "n_timesteps" in block or ("n_steps" in block and ("n_epochs" in block or "gae_lambda" in block))


def opened(block: Mapping[str, Value]) -> dict[str, Value]:
    """Returns a block whose `policy_kwargs` is a mapping, not its text."""
    opened = dict(block)
    if isinstance(text := opened.get("policy_kwargs"), str):
        try:
            opened["policy_kwargs"] = literal(text)
        except (SyntaxError, ValueError, TypeError):
            opened["policy_kwargs"] = Unresolved(text, "not readable as dict(...)")
    return opened


def read_model(path: Path, env: str | None, largest: int) -> dict[str, Value]:
    """Returns the arguments in a saved model: its JSON file `data`. Its pickled parts are never loaded."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if "data" not in names or archive.getinfo("data").file_size > largest:
            message = f"not a model that Stable-Baselines3 saved: no file data of at most {largest} bytes"
            raise ConfigError([Problem(str(path), message, value=", ".join(names[:5]))])
        try:
            stored = json.loads(archive.read("data"))
        except (ValueError, RecursionError) as error:
            raise ConfigError([Problem(str(path), f"its file data is not readable as JSON: {error}")]) from error
    if not isinstance(stored, dict):
        raise ConfigError([Problem(str(path), "its file data holds no keys")])
    keys: dict[str, Value] = {**({"env": env} if env else {}), "normalize": _SAVED_APART}
    if isinstance(steps := stored.get("_total_timesteps"), int) and steps > 0:
        keys["n_timesteps"] = steps
    for name, value in stored.items():
        if name in _STATE:
            keys[name] = None
        elif isinstance(value, dict) and ":serialized:" in value:
            keys |= _of_pickled(name, value)
        elif name == "policy_kwargs" and isinstance(value, dict):
            keys |= {f"{name}.{inner}": each for inner, each in value.items()} or {name: {}}
        else:
            keys[name] = value
    return keys


def _of_pickled(name: str, value: Mapping[str, Value]) -> dict[str, Value]:
    """Returns what a saved model says in plain text about a value that it pickles."""
    plain = {key: each for key, each in value.items() if not key.startswith((":", "__"))}
    if name == "policy_kwargs":
        return {f"{name}.{key}": each for key, each in plain.items()}
    schedule = str(plain.get("value_schedule", ""))
    if match := re.fullmatch(r"ConstantSchedule\(val=([\d.eE+-]+)\)", schedule):
        return {name: float(match[1])}
    return {name: schedule if _linear(schedule) is not None else Unresolved("...", "pickled, and never loaded")}
