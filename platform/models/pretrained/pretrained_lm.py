"""Language models of a folder or hub id: their transformers config and their weights, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.errors import ConfigError
from rl_platform.models.causal_lm import meta_causal_lm
from rl_platform.models.pretrained.families import architecture_problems
from rl_platform.models.pretrained.folder_files import check_options, check_weights, reading
from rl_platform.models.pretrained.model_folder import model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def read_config(path: str, key: str) -> PretrainedConfig:
    """Returns the transformers config of the model at `path`, a value of the config key `key`.

    Raises ConfigError if there is none, or for an architecture or weights that the platform does not compute with.
    """
    from transformers import AutoConfig

    folder = model_folder(path, key)
    check_options(folder, key)
    with reading(key, "cannot be loaded", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_architecture(config, folder, key)
    return config


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
    check_architecture(config, folder, key)  # not all configs are of causal language models
    with reading(key, "no model can be built from its config.json", folder):
        return meta_causal_lm(config)
