"""SmolVLA in LeRobot's folder format: config.json and model.safetensors, without LeRobot itself.

Not covered: normalisers, see `lerobot_normalizer.py`; the tokenizer, which belongs to the vision-language model; and
Aloha's conversion of joints.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from rl_platform.disk import read_regular
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.hub_access import prepare_loading
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.pretrained.folder_files import MAX_JSON, reading, refuse_not_finite
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.models.vlas.inputs import cameras
from rl_platform.placement.estimates.smolvla_options import SMOLVLM2, SMOLVLM2_OPTIONS, smolvla_options

if TYPE_CHECKING:
    from rl_platform.models.vlas.smolvla_network import SmolVLAConfig, SmolVLANetwork

CONFIG, WEIGHTS = "config.json", "model.safetensors"
STATE, ACTION = "observation.state", "action"
KEY = "actor.model.path"
_VLM, _REST = "model.vlm_with_expert.", "model."
_UNREAD = "vlm.lm_head.weight"  # actions are no tokens
# older versions: normalize_inputs.[DATA SET_]buffer_observation_state.mean
STATISTICS = re.compile(r"(?:un)?normalize_(?:inputs|targets|outputs)\.(?:(.+)_)?buffer_(\w+)\.(\w+)")
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
        place = model_folder(self.path, KEY)
        if Path(place).is_dir():
            return Path(place)
        from huggingface_hub import snapshot_download

        with reading(KEY, "cannot be loaded", place):
            return Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors"]))

    @cached_property
    def options(self) -> dict[str, Any]:
        """config.json."""
        options = self.read_json(CONFIG)
        if options.get("type") != "smolvla":
            kind = options.get("type") or options.get("model_type")
            self.refuse(f"config.json describes a policy of type {kind}, not smolvla")
        for name, computed in _COMPUTED.items():
            if (value := options.get(name, computed[0])) not in computed:
                self.refuse(f"config.json has {name}: {value}", " or ".join(map(str, computed)))
        if isinstance(steps := options.get("num_steps", 1), int) and steps < 1:
            self.refuse(f"config.json has num_steps: {steps}", "at least 1")
        if options.get("resize_imgs_with_padding", ()) is None:
            self.refuse("config.json has resize_imgs_with_padding: null", "width and height of images")
        return options

    def config(self) -> SmolVLAConfig:
        """Returns the config of the network, of the vision-language model that config.json names."""
        from transformers import AutoConfig

        from rl_platform.models.vlas.smolvla_network import SmolVLAConfig

        options, name = self.options, str(self.options.get("vlm_model_name") or SMOLVLM2)
        if name == SMOLVLM2:
            vlm = dict(SMOLVLM2_OPTIONS)
        else:
            prepare_loading(name)
            with quiet_transformers(), reading(KEY, f"its vision-language model {name} cannot be loaded", name):
                vlm = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
        if vlm.get("model_type") != "smolvlm":
            self.refuse(f"its vision-language model {name} is of type {vlm.get('model_type')}", "smolvlm")
        with reading(KEY, "cannot be loaded", str(self.folder)):
            config = SmolVLAConfig(**smolvla_options(options, vlm))
        layers, experts = config.vlm_config.text_config.num_hidden_layers, options.get("num_expert_layers", -1)
        if experts > 0 and experts != layers:
            self.refuse(f"config.json has num_expert_layers: {experts}", f"{layers}, or -1 for as many")
        return config

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """model.safetensors, by the names in the file."""
        return self._read(lambda name: True)

    @cached_property
    def statistics(self) -> dict[str, Tensor]:
        """The tensors of model.safetensors that are statistics of a data set, in folders older than LeRobot 0.4."""
        return self._read(lambda name: STATISTICS.fullmatch(name) is not None)

    def _read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        from safetensors import safe_open

        if not (self.folder / WEIGHTS).is_file():
            self.refuse(f"the folder contains no {WEIGHTS}")
        with reading(KEY, "cannot be loaded", str(self.folder)), safe_open(self.folder / WEIGHTS, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118

    def fill(self, network: SmolVLANetwork) -> None:
        """Copies the weights into the network, as float32.

        Raises ConfigError for a tensor that is missing, has another shape or no place in the network.
        """
        wanted, missing = network.state_dict(), set(network.state_dict())
        for file_name, tensor in self.tensors.items():
            name = own_name(file_name)
            if name == _UNREAD or STATISTICS.fullmatch(file_name):
                continue
            if name not in wanted:
                self.refuse(f"{WEIGHTS}: SmolVLA has no tensor {file_name}")
            if tensor.shape != wanted[name].shape or not tensor.is_floating_point():
                shapes = f"{tensor.dtype} {list(tensor.shape)}"
                self.refuse(f"{WEIGHTS}: {file_name} is {shapes}", f"floating-point {list(wanted[name].shape)}")
            missing.discard(name)
            with torch.no_grad():
                wanted[name].copy_(tensor)
        if missing:
            self.refuse(f"{WEIGHTS}: {len(missing)} tensors are missing, as {file_name_of(min(missing))}")
        refuse_not_finite(((file_name_of(name), tensor) for name, tensor in wanted.items()), str(self.folder), KEY)

    def misfits(self, spaces: EnvSpaces) -> Iterator[Problem]:
        """Yields a problem for each feature of config.json that has another size than the environment's.

        The sizes of images are not compared, because images are resized. Fewer cameras are allowed, as in LeRobot.
        """
        inputs, outputs = (self.options.get(f"{kind}_features") or {} for kind in ("input", "output"))
        with reading(KEY, f"the features of {CONFIG} cannot be read", str(self.folder)):
            sizes = [(outputs, ACTION, spaces.action.size, "an action")]
            if not spaces.images:
                sizes.append((inputs, STATE, spaces.observation_size, "an observation"))
            for features, name, size, what in sizes:
                if name in features and (shape := features[name]["shape"]) != [size]:
                    message = f"{CONFIG} has {name} of shape {shape}, and {what} of the environment has {size} numbers"
                    yield Problem(KEY, message, value=self.path)
            seen = sum(each["type"] == "VISUAL" for each in inputs.values())
            if inputs and spaces.images and (count := cameras(spaces.observation_shape)) > seen:
                message = f"{CONFIG} has {seen} images, and the environment has {count}"
                hint = "env.pixels.frame_stack: each image of a stack is a camera"
                yield Problem(KEY, message, value=self.path, hint=hint)

    def write(self, weights: Mapping[str, Tensor], target: Path, **options: object) -> None:
        """Writes the folder into `target` with trained weights, which have the network's names.

        A tensor keeps the type of the file if that loses nothing. options: replace those of config.json. Everything
        else stays as it is. Raises DataError for weights of another network.
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
        if (changed := self.options | options) != self.options:
            (target / CONFIG).write_text(json.dumps(changed, indent=4) + "\n", encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / WEIGHTS, {"format": "pt"})

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file of the folder."""
        with reading(KEY, f"{name} cannot be read", str(self.folder)):
            content = json.loads(read_regular(self.folder / name, MAX_JSON).decode("utf-8-sig"))
        if not isinstance(content, dict):
            self.refuse(f"{name} holds {type(content).__name__} instead of a JSON object")
        return content

    def refuse(self, message: str, allowed: str = "") -> NoReturn:
        """Raises ConfigError of actor.model.path."""
        raise ConfigError([Problem(KEY, message, value=self.path, allowed=allowed)])


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
