"""Reads how a folder of LeRobot normalises states and actions.

Since LeRobot 0.4, policy_preprocessor.json and policy_postprocessor.json have modes, eps and a file of statistics. In
older folders the modes are in config.json and the statistics in model.safetensors. Not covered: steps of processors
that compute something else. A folder with such a step is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from rl_platform.errors import ConfigError, Problem
from rl_platform.models.pretrained.folder_files import reading
from rl_platform.models.vlas.lerobot_folder import ACTION, CONFIG, KEY, STATE, STATISTICS, LeRobotFolder

# by feature: the file and the step that normalises the feature
_STEPS = {
    STATE: ("policy_preprocessor.json", "normalizer_processor"),
    ACTION: ("policy_postprocessor.json", "unnormalizer_processor"),
}
_NEUTRAL = (  # steps that change no number
    "rename_observations_processor",
    "to_batch_processor",
    "smolvla_new_line_processor",
    "tokenizer_processor",
    "device_processor",
)
_REQUIRED, _OPTIONAL = {"features", "norm_map"}, {"eps", "normalize_observation_keys"}
_MODES: Mapping[str, tuple[str, ...]] = {
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
_DEFAULT_MODES = {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
_EPS = 1e-8


@dataclass(frozen=True)
class LeRobotNormalizer:
    """Normalises `feature` by `mode` of LeRobot. statistics: by the name of the data set; None if there is one.

    file: the file that has the mode, for messages. Raises ConfigError for statistics that are missing or damaged.
    """

    folder: LeRobotFolder
    feature: str
    file: str
    mode: str
    statistics: Mapping[str | None, Mapping[str, Tensor]]
    eps: float = _EPS

    @classmethod
    def of(cls, folder: LeRobotFolder, feature: str) -> LeRobotNormalizer:
        """Reads the normaliser of STATE or ACTION from the files of the processors, or from those of older versions."""
        files = [name for name, _ in _STEPS.values() if (folder.folder / name).is_file()]
        if len(files) == 1:
            folder.refuse(f"the folder has {files[0]} only", " and ".join(name for name, _ in _STEPS.values()))
        with reading(KEY, "its normalisation cannot be read", str(folder.folder)):
            return cls._of_processor(folder, feature) if files else cls._of_weights(folder, feature)

    @classmethod
    def _of_processor(cls, folder: LeRobotFolder, feature: str) -> LeRobotNormalizer:
        file, kind = _STEPS[feature]
        steps = folder.read_json(file)["steps"]
        for name in (step.get("registry_name") or step.get("class") for step in steps):
            if name not in (*_NEUTRAL, kind):
                folder.refuse(f"{file} has the step {name}", ", ".join((*_NEUTRAL, kind)))
        of_kind = [step for step in steps if step.get("registry_name") == kind]
        if not of_kind:
            return cls(folder, feature, file, "IDENTITY", {})
        if len(of_kind) > 1:
            folder.refuse(f"{file} has {len(of_kind)} steps {kind}", "1")
        options = of_kind[0].get("config") or {}
        if absent := _REQUIRED - options.keys():
            folder.refuse(f"{file}: {kind} lacks {' and '.join(sorted(absent))}")
        if unknown := options.keys() - _REQUIRED - _OPTIONAL:
            folder.refuse(f"{file}: {kind} has {', '.join(sorted(unknown))}", ", ".join(sorted(_REQUIRED | _OPTIONAL)))
        eps = options.get("eps", _EPS)
        if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
            folder.refuse(f"{file}: eps is {eps}", "a number that is not negative")
        modes = options["norm_map"]
        _refuse_normalised_images(folder, file, modes)
        name = "ACTION"
        if feature == STATE:  # LeRobot does not change observations that these options do not list
            listed = options.get("normalize_observation_keys")
            known = feature in options["features"] and (listed is None or feature in listed)
            name = options["features"][feature]["type"] if known else ""
        mode = str(modes.get(name, "IDENTITY"))
        statistics = _file_of_statistics(folder, file, of_kind[0].get("state_file"), feature)
        return cls(folder, feature, file, mode, {None: statistics} if statistics else {}, eps)

    @classmethod
    def _of_weights(cls, folder: LeRobotFolder, feature: str) -> LeRobotNormalizer:
        modes = folder.options.get("normalization_mapping", _DEFAULT_MODES)
        statistics: dict[str | None, dict[str, Tensor]] = {}
        _refuse_normalised_images(folder, CONFIG, modes)
        for name, tensor in folder.statistics.items():
            if (match := STATISTICS.fullmatch(name)) and match[2].replace("_", ".") == feature:
                statistics.setdefault(match[1], {})[match[3]] = tensor
        mode = str(modes.get("STATE" if feature == STATE else "ACTION", "IDENTITY"))
        return cls(folder, feature, CONFIG, mode, statistics)

    @property
    def scales_a_range(self) -> bool:
        """Whether two numbers of the statistics become -1 and 1; else there are mean and deviation, or none."""
        return self.mode not in ("IDENTITY", "MEAN_STD")

    def center_and_scale(self, size: int, data_set: str | None) -> tuple[list[float], list[float]]:
        """Returns center and scale [size]: (x - center) / scale is the number that the network reads or writes.

        They are 0 and 1 if the folder does not normalise the feature. data_set: its name, in folders with several.
        """
        if data_set not in self.statistics and (self.statistics or data_set is not None):
            self._refuse_data_set(data_set)
        if self.mode not in _MODES:
            self.folder.refuse(f"{self.file} normalises {self.feature} by {self.mode}", ", ".join(_MODES))
        stats, names = self.statistics.get(data_set), _MODES[self.mode]
        if not names or not stats:
            return [0.0] * size, [1.0] * size
        if absent := [name for name in names if name not in stats]:
            self._refuse(f"lack {' and '.join(absent)}, which {self.mode} needs")
        for name in names:
            if tuple(stats[name].shape) != (size,):
                self._refuse(f"have {name} of shape {list(stats[name].shape)}, and the environment needs [{size}]")
        low, high = (stats[name].float().double() for name in names)
        if not (low.isfinite().all() and high.isfinite().all()):
            self._refuse("are not finite: the folder was saved without statistics of a data set")
        if self.mode == "MEAN_STD":
            # LeRobot adds eps where it divides
            center, scale = low, high + (self.eps if self.feature == STATE else 0)
        else:
            width = torch.where(high == low, self.eps, high - low)
            center, scale = low + width / 2, width / 2
        if self.feature == STATE and not scale.float().all():
            self._refuse(f"have a spread of 0, and eps is {self.eps}")
        return center.tolist(), scale.tolist()

    def _refuse(self, message: str) -> NoReturn:
        self.folder.refuse(f"the statistics of {self.feature} {message}")

    def _refuse_data_set(self, data_set: str | None) -> NoReturn:
        named = ", ".join(sorted(name for name in self.statistics if name))
        message = f"{self.folder.folder} has no statistics of {self.feature} of this data set"
        shown = "null" if data_set is None else data_set
        raise ConfigError([Problem("actor.model.unnorm_key", message, value=shown, allowed=named or "null")])


def _refuse_normalised_images(folder: LeRobotFolder, file: str, modes: Mapping[str, object]) -> None:
    if (mode := modes.get("VISUAL", "IDENTITY")) != "IDENTITY":
        folder.refuse(f"{file} normalises images by {mode}", "IDENTITY")


def _file_of_statistics(folder: LeRobotFolder, file: str, name: str | None, feature: str) -> dict[str, Tensor]:
    """Returns the statistics of a feature in the file `name` of a step; none if `name` is None."""
    from safetensors.torch import load_file

    if name is None:
        return {}
    place = folder.folder / Path(name).name
    if not place.is_file():
        folder.refuse(f"{file} names {name}, which is missing")
    start = f"{feature}."
    tensors = {each: tensor for each, tensor in load_file(place).items() if each.startswith(start)}
    return {each.removeprefix(start): tensor for each, tensor in tensors.items()}
