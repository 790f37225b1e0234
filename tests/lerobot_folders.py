"""Folders of LeRobot with the weights of the goldens, and with statistics of each version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from smolvla_goldens import CASES, FILE, NUMBERS, OPTIONS, SHAPE, VLM, weight
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.models.vlas import build as vlas
from rl_platform.models.vlas.flow_policy import FlowPolicy

GOLDENS: dict[str, Any] = json.loads(FILE.read_text())
ACTIONS = ActionSpace("continuous", 6)
BOUNDS = (-1.0,) * 6, (1.0,) * 6
IMAGES = EnvSpaces(SHAPE, ACTIONS, (6,), *BOUNDS, 0, "uint8")
STATES = EnvSpaces((NUMBERS,), ACTIONS, (6,), *BOUNDS)
STATS = {
    "observation.state": {"mean": torch.arange(5.0), "std": torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0])},
    "action": {"mean": torch.linspace(-1, 1, 6), "std": torch.linspace(0.5, 2, 6)},
}
PROCESSORS = {
    "policy_preprocessor": (5, "normalizer_processor"),
    "policy_postprocessor": (0, "unnormalizer_processor"),
}
NORMALIZER: dict[str, Any] = {
    "eps": 1e-8,
    "features": {
        "observation.state": {"type": "STATE", "shape": [NUMBERS]},
        "action": {"type": "ACTION", "shape": [6]},
    },
    "norm_map": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}


def folder_of(folder: Path, case: str = "as published", **changes: object) -> Path:
    """Writes a folder of LeRobot without statistics."""
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    (folder / "vlm" / "config.json").write_text(json.dumps(VLM))
    options = OPTIONS | CASES[case] | {"vlm_model_name": str(folder / "vlm")} | changes
    (folder / "config.json").write_text(json.dumps({name: each for name, each in options.items() if each is not None}))
    save_file(
        {name: weight(name, shape) for name, shape in GOLDENS[case]["shapes"].items()}, folder / "model.safetensors"
    )
    return folder


def with_processors(folder: Path, stats: Mapping[str, Mapping[str, Tensor]] = STATS, **options: object) -> Path:
    """Adds normalisers as LeRobot stores them since 0.4. options: of both; None removes one."""
    config = {name: each for name, each in (NORMALIZER | options).items() if each is not None}
    for name, (place, kind) in PROCESSORS.items():
        step = {"registry_name": kind, "config": config}
        if stats:  # LeRobot writes no empty file either
            step["state_file"] = f"{name}_step_{place}_{kind}.safetensors"
            tensors = {f"{key}.{stat}": tensor for key, each in stats.items() for stat, tensor in each.items()}
            save_file(tensors, folder / str(step["state_file"]))
        others = [{"registry_name": "device_processor", "config": {}}] * place
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": [*others, step]}))
    return folder


def with_buffers(folder: Path, data_set: str = "") -> Path:
    """Adds statistics as LeRobot stored them before 0.4, of one or of several data sets."""
    parts = {"observation.state": ["normalize_inputs"], "action": ["normalize_targets", "unnormalize_outputs"]}
    tensors = load_file(folder / "model.safetensors")
    for key, places in parts.items():
        for place in places:
            for stat, tensor in STATS[key].items():
                tensors[f"{place}.{data_set}buffer_{key.replace('.', '_')}.{stat}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def section(folder: Path, **changes: Any) -> Model:
    return Model(**{"type": "smolvla", "path": str(folder), "tokenizer": "bytes", "num_action_chunks": 4} | changes)


def loaded(folder: Path, spaces: EnvSpaces, **changes: Any) -> FlowPolicy:
    model = section(folder, **changes)
    policy = vlas.build(model, spaces, ActionLevels(model.num_action_chunks, 6), 1, ["go", "come"])
    assert isinstance(policy, FlowPolicy)
    return policy
