"""Pretrained weights one decoder layer at a time, for models of which every rank holds a part.

A model on the meta device takes no memory. Its training engine allocates what the rank holds and copies that from each
part. A process then needs its own share and one part: a layer, or the embedding. The files are mapped into memory, so
the processes of a node share them. transformers renames and merges the tensors of a part as it does for a whole model.
Not covered: files other than safetensors, adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from rl_platform.errors import ConfigError, Problem
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.language import LanguageModel
from rl_platform.models.pretrained.folder_files import LAYER, reading, refuse_layers, refuse_not_finite
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.models.pretrained.pretrained_lm import empty_causal_lm, read_causal_lm
from rl_platform.models.pretrained.probe import own_forward, probe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")


def model_in_parts(
    path: str, config: PretrainedConfig, key: str, *, value_head: bool, probed: bool
) -> LanguageModel | None:
    """Returns the model of `path` on the meta device, with the parts that fill it; None without safetensors files.

    `probed`: its first layers are compared with transformers, see `probe`. Raises DataError if that fails.
    """
    folder = model_folder(path, key)
    if not safetensors_files(folder):
        return None
    if probed:
        network = read_causal_lm(folder, first_layers(config), key, partly=True)
        with reading(key, "computes nothing", folder):
            probe(network, partial(own_forward, network, LanguageModel(network)), path, key)
    return WeightParts(folder, config, key, value_head=value_head).empty()


def first_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a model with the first layers of this one, two or as many as have all kinds of layers."""
    kinds = getattr(config, "layer_types", None) or []
    number = max([2, *(kinds.index(kind) + 1 for kind in kinds)])
    number = max(number, getattr(config, "first_k_dense_replace", 0) + 1)
    first = deepcopy(config)
    first.num_hidden_layers = min(number, config.num_hidden_layers)
    if kinds:
        first.layer_types = kinds[: first.num_hidden_layers]
    return first


class WeightParts:
    """The weights of a model in `folder`. value_head: as of `LanguageModel`."""

    def __init__(self, folder: str, config: PretrainedConfig, key: str, *, value_head: bool) -> None:
        self.folder, self.config, self.key, self.value_head = folder, config, key, value_head

    def empty(self) -> LanguageModel:
        """Returns the model on the meta device, to be filled from these parts. Its value head and the buffers that are
        not saved have their values."""
        language = LanguageModel(self._network(), value_head=self.value_head)
        language.pretrained = self
        return language

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yields whole float32 parameters by their names in `LanguageModel`, each once. Tied ones come together.

        A part is cleared when the next one is read. Raises ConfigError if a file cannot be read or a
        weight is missing.
        """
        from safetensors import safe_open

        network = self._network()
        _empty(network)
        language = LanguageModel(network, value_head=self.value_head)
        missing = set(language.state_dict())
        if head := {name: tensor for name, tensor in language.state_dict().items() if not tensor.is_meta}:
            missing -= head.keys()
            yield head  # of values: it is in no file
        with reading(self.key, "cannot be loaded", self.folder), ExitStack() as stack, quiet_transformers():
            files = [stack.enter_context(safe_open(file, "pt")) for file in safetensors_files(self.folder)]
            slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
            refuse_layers(self._surplus(network, slices), self.folder, self.key)
            for part in _grouped(slices).values():
                _convert(network, part)
                network.tie_weights()
                tied = {name: language.state_dict()[name] for name in missing}
                if tied := {name: tensor for name, tensor in tied.items() if not tensor.is_meta}:
                    missing -= tied.keys()
                    refuse_not_finite(tied.items(), self.folder, self.key)
                    yield tied
                    tied.clear()  # the caller still has it
                _empty(network)
        if missing:
            message = f"{len(missing)} weights are missing, as {min(missing)}"
            raise ConfigError([Problem(self.key, message, value=self.folder)])

    def _surplus(self, network: PreTrainedModel, names: Iterable[str]) -> list[str]:
        """Returns the tensors of layers beyond the last one, without those that transformers ignores in such a
        model."""
        layers = ((name, LAYER.search(name)) for name in names)
        beyond = [name for name, layer in layers if layer and int(layer[1]) >= self.config.num_hidden_layers]
        ignored = network._keys_to_ignore_on_load_unexpected or ()
        return [name for name in beyond if not any(re.search(pattern, name) for pattern in ignored)]

    def _network(self) -> PreTrainedModel:
        return empty_causal_lm(self.config, self.folder, self.key)


def safetensors_files(folder: str) -> list[Path]:
    """Returns the safetensors files of a folder or hub id, which are downloaded; none if it has other files only."""
    place = Path(folder)
    if not place.is_dir():
        from huggingface_hub import snapshot_download

        place = Path(snapshot_download(folder, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
    whole = place / "model.safetensors"
    return [whole] if whole.is_file() else sorted(place.glob("model-*-of-*.safetensors"))


def _grouped(slices: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Groups tensors of a file by layer; each tensor outside the layers is a group."""
    groups: dict[str, dict[str, T]] = {}
    for name, tensor in slices.items():
        layer = LAYER.search(name)
        groups.setdefault(layer[1] if layer else name, {})[name] = tensor
    return groups


def _convert(network: PreTrainedModel, part: dict[str, object]) -> None:
    """Loads tensors of the files into an empty model, under the names and in the shapes of the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping = get_model_conversion_mapping(network)
    convert_and_load_state_dict_in_model(
        network, part, LoadStateDictConfig(dtype=torch.float32, weight_mapping=mapping)
    )


def _empty(network: nn.Module) -> None:
    """Frees parameters and buffers that are saved."""
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta or name in module._non_persistent_buffers_set:
                    continue
                empty = tensor.detach().to("meta")
                tensors[name] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty  # type: ignore[assignment]
