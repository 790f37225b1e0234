"""SmolVLA in LeRobot's folder format: config.json, model.safetensors and the statistics of the data set.

The statistics are files of the processors (policy_preprocessor.json and policy_postprocessor.json name them), or, in
folders of older versions, tensors of model.safetensors. LeRobot itself is not needed. Not covered: its tokenizer, which
belongs to the vision-language model, and Aloha's conversion of joints.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from rl_platform.disk import read_regular
from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.pretrained.folder_files import MAX_JSON, reading, refuse_not_finite
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.placement.estimates.smolvla_options import SMOLVLM2, SMOLVLM2_OPTIONS, smolvla_options

if TYPE_CHECKING:
    from rl_platform.models.vlas.smolvla_network import SmolVLAConfig, SmolVLANetwork

CONFIG, WEIGHTS = "config.json", "model.safetensors"
STATE, ACTION = "observation.state", "action"
_KEY, _STATISTICS_KEY = "actor.model.path", "actor.model.unnorm_key"
_VLM, _REST = "model.vlm_with_expert.", "model."
_UNREAD = "vlm.lm_head.weight"  # actions are no tokens
# older versions: normalize_inputs.[DATA SET_]buffer_observation_state.mean
_STATISTICS = re.compile(r"(?:un)?normalize_(?:inputs|targets|outputs)\.(?:(.+)_)?buffer_(\w+)\.(\w+)")
_MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
_EPSILON = 1e-8  # of LeRobot, in its denominators
# options that change the computation, and their values that are computed, the default first
_COMPUTED: Mapping[str, tuple[object, ...]] = {
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "use_delta_joint_actions_aloha": (False,),
    "attention_mode": ("cross_attn", "self_attn"),
    "n_obs_steps": (1,),
}


@dataclass(frozen=True)
class LeRobotFolder:
    """A SmolVLA policy of LeRobot at `path`, a folder or a hub id, which is downloaded.

    Raises ConfigError of actor.model.path for files that are missing, damaged or of another policy.
    """

    path: str

    @cached_property
    def folder(self) -> Path:
        place = model_folder(self.path, _KEY)
        if Path(place).is_dir():
            return Path(place)
        from huggingface_hub import snapshot_download

        with reading(_KEY, "cannot be loaded", place):
            return Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors"]))

    @cached_property
    def options(self) -> dict[str, Any]:
        """config.json."""
        options = self._json(CONFIG)
        if options.get("type") != "smolvla":
            kind = options.get("type") or options.get("model_type")
            self._refuse(f"config.json describes a policy of type {kind}, not smolvla")
        for name, computed in _COMPUTED.items():
            if (value := options.get(name, computed[0])) not in computed:
                self._refuse(f"config.json has {name}: {value}", " or ".join(map(str, computed)))
        if options.get("resize_imgs_with_padding", ()) is None:
            self._refuse("config.json has resize_imgs_with_padding: null", "width and height of images")
        if (mode := (options.get("normalization_mapping") or {}).get("VISUAL", "IDENTITY")) != "IDENTITY":
            self._refuse(f"config.json normalises images by {mode}", "IDENTITY")
        return options

    def config(self) -> SmolVLAConfig:
        """Returns the config of the network, of the vision-language model that config.json names."""
        from transformers import AutoConfig

        from rl_platform.models.vlas.smolvla_network import SmolVLAConfig

        options, name = self.options, str(self.options.get("vlm_model_name") or SMOLVLM2)
        if name == SMOLVLM2:
            vlm = dict(SMOLVLM2_OPTIONS)
        else:
            with quiet_transformers(), reading(_KEY, f"its vision-language model {name} cannot be loaded", name):
                vlm = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
        if vlm.get("model_type") != "smolvlm":
            self._refuse(f"its vision-language model {name} is of type {vlm.get('model_type')}", "smolvlm")
        with reading(_KEY, "cannot be loaded", str(self.folder)):
            config = SmolVLAConfig(**smolvla_options(options, vlm))
        layers, experts = config.vlm_config.text_config.num_hidden_layers, options.get("num_expert_layers", -1)
        if experts > 0 and experts != layers:
            self._refuse(f"config.json has num_expert_layers: {experts}", f"{layers}, or -1 for as many")
        return config

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """model.safetensors, by the names in the file."""
        from safetensors.torch import load_file

        if not (self.folder / WEIGHTS).is_file():
            self._refuse(f"the folder contains no {WEIGHTS}")
        with reading(_KEY, "cannot be loaded", str(self.folder)):
            return load_file(self.folder / WEIGHTS)

    def fill(self, network: SmolVLANetwork) -> None:
        """Copies the weights into the network, as float32.

        Raises ConfigError for a tensor that is missing, has another shape or no place in the network.
        """
        wanted, missing = network.state_dict(), set(network.state_dict())
        for file_name, tensor in self.tensors.items():
            name = own_name(file_name)
            if name == _UNREAD or _STATISTICS.fullmatch(file_name):
                continue
            if name not in wanted:
                self._refuse(f"{WEIGHTS}: SmolVLA has no tensor {file_name}")
            if tensor.shape != wanted[name].shape or not tensor.is_floating_point():
                shapes = f"{tensor.dtype} {list(tensor.shape)}"
                self._refuse(f"{WEIGHTS}: {file_name} is {shapes}", f"floating-point {list(wanted[name].shape)}")
            missing.discard(name)
            with torch.no_grad():
                wanted[name].copy_(tensor)
        if missing:
            self._refuse(f"{WEIGHTS}: {len(missing)} tensors are missing, as {file_name_of(min(missing))}")
        refuse_not_finite(((file_name_of(name), tensor) for name, tensor in wanted.items()), str(self.folder), _KEY)

    def statistics(self, feature: str, size: int, data_set: str | None) -> tuple[list[float], list[float]] | None:
        """Returns center and scale [size] of a feature, so that (x - center) / scale is what the network reads or
        writes; None if the folder does not normalise it. data_set: in older folders with statistics of several."""
        mode = self._mode("STATE" if feature == STATE else "ACTION")
        sets = self._in_files(feature) or self._in_weights(feature)
        if data_set not in sets and (sets or data_set is not None):
            named = ", ".join(sorted(name for name in sets if name))
            message = f"{self.folder} has no statistics of {feature} of this data set"
            shown = "null" if data_set is None else data_set
            raise ConfigError([Problem(_STATISTICS_KEY, message, value=shown, allowed=named or "null")])
        stats = sets.get(data_set)
        if mode == "IDENTITY" or not stats:
            return None
        if mode not in _MODES:
            self._refuse(f"config.json normalises {feature} by {mode}", ", ".join(_MODES))
        first, second = _MODES[mode]
        if absent := [name for name in (first, second) if name not in stats]:
            self._refuse(f"the statistics of {feature} lack {' and '.join(absent)}, which {mode} needs")
        low, high = (stats[name].double().flatten() for name in (first, second))
        if len(low) != size or len(high) != size:
            self._refuse(f"the statistics of {feature} have {len(low)} numbers, and the environment has {size}")
        if not (low.isfinite().all() and high.isfinite().all()):
            self._refuse(f"the statistics of {feature} are not finite: those of a data set were never stored")
        if mode == "MEAN_STD":
            return low.tolist(), (high + (_EPSILON if feature == STATE else 0)).tolist()
        width = torch.where(high == low, _EPSILON, high - low)
        return (low + width / 2).tolist(), (width / 2).tolist()

    def write(self, weights: Mapping[str, Tensor], target: Path) -> None:
        """Writes the folder into `target` with trained weights, which have the network's names; the rest as it is.

        A tensor keeps the type of the file if that loses nothing. Raises DataError for weights of another network.
        """
        from safetensors.torch import save_file

        tensors, places = dict(self.tensors), {own_name(name): name for name in self.tensors}
        for name, tensor in weights.items():
            if name not in places or tensor.shape != tensors[places[name]].shape:
                raise DataError(
                    f"{self.folder} is of another model than the run: no {file_name_of(name)} of {list(tensor.shape)}"
                )
            rounded = tensor.to(tensors[places[name]].dtype)
            tensors[places[name]] = rounded if torch.equal(rounded.to(tensor.dtype), tensor) else tensor
        for file in self.folder.iterdir():
            if file.is_file() and file.name != WEIGHTS:
                shutil.copyfile(file, target / file.name)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / WEIGHTS, {"format": "pt"})

    def _mode(self, kind: str) -> str:
        modes = self.options.get("normalization_mapping") or {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
        return str(modes.get(kind, "IDENTITY"))

    def _in_files(self, feature: str) -> dict[str | None, dict[str, Tensor]]:
        """The statistics in the files of the processors; their data set has no name."""
        from safetensors.torch import load_file

        name = "policy_preprocessor.json" if feature == STATE else "policy_postprocessor.json"
        if not (self.folder / name).is_file():
            return {}
        found: dict[str, Tensor] = {}
        with reading(_KEY, f"{name} cannot be read", str(self.folder)):
            for step in self._json(name)["steps"]:
                if "normalizer" not in str(step.get("registry_name")) or "state_file" not in step:
                    continue
                file = self.folder / Path(step["state_file"]).name
                if not file.is_file():
                    self._refuse(f"{name} names {step['state_file']}, which is missing")
                tensors = load_file(file)
                start = f"{feature}."
                found |= {each.removeprefix(start): tensors[each] for each in tensors if each.startswith(start)}
        return {None: found} if found else {}

    def _in_weights(self, feature: str) -> dict[str | None, dict[str, Tensor]]:
        """The statistics in model.safetensors by the names of data sets, of an older version of LeRobot."""
        sets: dict[str | None, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            if (match := _STATISTICS.fullmatch(name)) and match[2].replace("_", ".") == feature:
                sets.setdefault(match[1], {})[match[3]] = tensor
        return sets

    def _json(self, name: str) -> dict[str, Any]:
        with reading(_KEY, f"{name} cannot be read", str(self.folder)):
            content = json.loads(read_regular(self.folder / name, MAX_JSON).decode("utf-8-sig"))
        if not isinstance(content, dict):
            self._refuse(f"{name} holds {type(content).__name__} instead of a JSON object")
        return content

    def _refuse(self, message: str, allowed: str = "") -> NoReturn:
        raise ConfigError([Problem(_KEY, message, value=self.path, allowed=allowed)])


def own_name(name: str) -> str:
    """Returns the network's name of a tensor of LeRobot's file; compiled models have `_orig_mod.` in theirs."""
    name = name.replace("_orig_mod.", "")
    for start, ours in ((f"{_VLM}vlm.model.", "vlm."), (_VLM, ""), (_REST, "")):
        if name.startswith(start):
            return ours + name.removeprefix(start)
    return name


def file_name_of(name: str) -> str:
    """Returns LeRobot's name of a tensor of the network."""
    if name.startswith("vlm."):
        return f"{_VLM}vlm.model.{name.removeprefix('vlm.')}"
    return f"{_VLM if name.startswith('lm_expert.') else _REST}{name}"
