"""Checks of a Hugging Face model's files: which one is damaged, limits of its config.json, and its weights.

transformers reports damaged files by exceptions of many types, and loads silently what config.json does not describe.
Not covered: which architectures the platform computes, see `families.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from rl_platform.disk import read_regular
from rl_platform.errors import ConfigError, PlatformError, Problem

MAX_JSON = 200 * 2**20  # bytes of a file
MAX_OPTION = 2**31  # of every whole number in config.json
MAX_BY_NAME = {"layer": 1_000, "expert": 10_000}  # of options whose names contain this: each costs a module
SHOWN = 300  # characters of another library's message
LAYER = re.compile(r"\.(\d+)\.")
_BUFFERS = re.compile(r"rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias")  # not read any more
_PANIC = "PanicException"  # of libraries in Rust; it is no Exception


@contextmanager
def reading(key: str, message: str, folder: str, hint: str = "") -> Iterator[None]:
    """Turns every error of another library that reads `folder` into a ConfigError of `key`. hint: if the error has no
    other one."""
    try:
        yield
    except PlatformError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        problem = not_loaded(key, message, folder, error)
        raise ConfigError([replace(problem, hint=problem.hint or hint)]) from error


def not_loaded(key: str, message: str, folder: str, error: BaseException) -> Problem:
    """Returns the problem that `folder` could not be read, with its damaged file if there is one.

    For a hub id it has a hint how to work offline.
    """
    reason = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split()) or type(error).__name__
    hint = ""
    if not Path(folder).is_dir():
        hint = f"where there is a network: hf download {folder} --local-dir FOLDER; then {key}=FOLDER"
    elif "weights_only" in reason:
        reason, hint = "its weights are a pickle that holds code, which is never run", "save them as safetensors"
    elif damaged := damaged_file(Path(folder)):
        reason = damaged
    return Problem(key, f"{message}: {reason[:SHOWN]}", value=folder, hint=hint)


def damaged_file(folder: Path) -> str:
    """Returns the first file of the folder that cannot be read and the reason, "" if all can."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(read_regular(file, MAX_JSON).decode("utf-8-sig"))
            if not isinstance(content, dict):
                return f"{file.name}: holds {type(content).__name__} instead of a JSON object"
            if file.name.endswith(".index.json") and (problem := _index_problem(folder, content)):
                return f"{file.name}: {problem}"
        except RecursionError:
            return f"{file.name}: lists or objects are nested too deeply"
        except (OSError, ValueError) as error:
            return f"{file.name}: {str(error)[:SHOWN]}"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as error:  # its own types, and those of the file system
            return f"{file.name}: {error}"
    return ""


def _index_problem(folder: Path, index: Mapping[str, object]) -> str:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        return "weight_map must name the file of each tensor"
    for name, file in names.items():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            return f"{name} is in {file}, which is outside of the folder"
        if not (folder / file).is_file():
            return f"{name} is in {file}, which is missing"
    return ""


def check_options(folder: str, key: str) -> None:
    """Raises ConfigError for a config.json in `folder` whose numbers no model has, and for an index of weights that
    names other files than those of the folder. Does nothing for a hub id."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return
    with reading(key, "cannot be loaded", folder):
        options = json.loads(read_regular(file, MAX_JSON).decode("utf-8-sig"))
        messages = [f"config.json: {each}" for each in _absurd(options, "")]
        # transformers reads any file that the index names, also a device
        for index in sorted(Path(folder).glob("*.index.json")):
            if index.with_name(index.name.removesuffix(".index.json")).is_file():
                continue  # the weights are in one file
            content = json.loads(read_regular(index, MAX_JSON).decode("utf-8-sig"))
            problem = _index_problem(Path(folder), content) if isinstance(content, dict) else "holds no JSON object"
            messages += [f"{index.name}: {problem}"] if problem else []
    problems = [Problem(key, each, value=folder) for each in messages]
    if problems:
        raise ConfigError(problems)


def _absurd(value: object, name: str) -> Iterator[str]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inner:
        yield from _absurd(each, f"{name}.{step}" if name else str(step))
    if isinstance(value, int) and not isinstance(value, bool):
        limits = [limit for part, limit in MAX_BY_NAME.items() if part in name.rpartition(".")[2]]
        most = min([MAX_OPTION, *limits])
        if not -1 <= value <= most:
            yield f"{name} is {str(value)[:30]}; allowed are numbers from -1 to {most}"


def check_weights(network: nn.Module, missing: Iterable[str], unexpected: Iterable[str], folder: str, key: str) -> None:
    """Raises ConfigError if weights of a loaded network are missing, are not finite or were no floating-point numbers.
    Also raises it if the files hold layers that the network does not have."""
    if absent := sorted(missing):  # transformers would initialise them randomly
        doubt = ": is it a classifier?" if absent[0].startswith("score") else ""
        raise ConfigError([Problem(key, f"{len(absent)} weights are missing, as {absent[0]}{doubt}", value=folder)])
    refuse_layers(unexpected, folder, key)
    names = dict(network.named_parameters())
    for name, kind in _kinds(folder).items():
        if name in names and not kind.startswith(("F", "BF")):
            message = f"{_file_of(name, folder)}{name} holds values of type {kind}, no floating-point numbers"
            raise ConfigError([Problem(key, message, value=folder)])
    refuse_not_finite(names.items(), folder, key)


def refuse_layers(unexpected: Iterable[str], folder: str, key: str) -> None:
    """Raises ConfigError for tensors of layers that the model of config.json does not have. Other heads are ignored."""
    if layers := sorted(name for name in unexpected if LAYER.search(name) and not _BUFFERS.search(name)):
        message = f"{_file_of(layers[0], folder)}config.json describes no {layers[0]}: {len(layers)} weights too many"
        hint = "compare num_hidden_layers and the kind of model with those that the weights were saved with"
        raise ConfigError([Problem(key, message, value=folder, hint=hint)])


def refuse_not_finite(tensors: Iterable[tuple[str, Tensor]], folder: str, key: str) -> None:
    """Raises ConfigError for the first tensor with a NaN or an infinite value. Reads each value once."""
    for name, tensor in tensors:
        if tensor.numel() and not torch.isfinite(torch.stack(tensor.detach().aminmax())).all():
            message = f"{_file_of(name, folder)}{name} holds values that are not finite"
            raise ConfigError([Problem(key, message, value=folder, hint="the file is damaged, or training diverged")])


def _kinds(folder: str) -> dict[str, str]:
    """Returns the types of the tensors in the safetensors files of a folder."""
    from safetensors import safe_open

    kinds: dict[str, str] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            kinds |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return kinds


def _file_of(name: str, folder: str) -> str:
    """Returns the file of a tensor, as `model.safetensors: `; "" without one: transformers may have renamed it."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                return f"{file.name}: "
    return ""
