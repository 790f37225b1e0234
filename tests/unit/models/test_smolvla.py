"""SmolVLA computes LeRobot's numbers, and folders of LeRobot go in and out without a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smolvla_goldens import CASES, FILE, NUMBERS, OPTIONS, SHAPE, TASKS, TOLD, VLM, images, noise, state, weight
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import ConfigError, DataError
from rl_platform.models.vlas import build as vlas
from rl_platform.models.vlas.flow_policy import FlowPolicy
from rl_platform.models.vlas.inputs import Instructions
from rl_platform.models.vlas.lerobot_folder import LeRobotFolder

GOLDENS: dict[str, Any] = json.loads(FILE.read_text())
ACTIONS = ActionSpace("continuous", 6)
BOUNDS = (-1.0,) * 6, (1.0,) * 6
IMAGES = EnvSpaces(SHAPE, ACTIONS, (6,), *BOUNDS, 0, "uint8")
STATES = EnvSpaces((NUMBERS,), ACTIONS, (6,), *BOUNDS)
STATS = {
    "observation.state": {"mean": torch.arange(5.0), "std": torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0])},
    "action": {"mean": torch.linspace(-1, 1, 6), "std": torch.linspace(0.5, 2, 6)},
}


def folder_of(folder: Path, case: str = "as published", **changes: object) -> Path:
    """A folder of LeRobot with the weights of the goldens, without statistics."""
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    (folder / "vlm" / "config.json").write_text(json.dumps(VLM))
    options = OPTIONS | CASES[case] | {"vlm_model_name": str(folder / "vlm")} | changes
    (folder / "config.json").write_text(json.dumps(options))
    save_file(
        {name: weight(name, shape) for name, shape in GOLDENS[case]["shapes"].items()}, folder / "model.safetensors"
    )
    return folder


def with_processors(folder: Path) -> None:
    """Statistics as LeRobot stores them since 0.4."""
    steps = {"policy_preprocessor": (5, "normalizer_processor"), "policy_postprocessor": (0, "unnormalizer_processor")}
    for name, (place, kind) in steps.items():
        file = f"{name}_step_{place}_{kind}.safetensors"
        save_file(
            {f"{key}.{stat}": tensor for key, each in STATS.items() for stat, tensor in each.items()}, folder / file
        )
        others = [{"registry_name": "device_processor", "config": {}}] * place
        text = json.dumps({"name": name, "steps": [*others, {"registry_name": kind, "config": {}, "state_file": file}]})
        (folder / f"{name}.json").write_text(text)


def with_buffers(folder: Path, data_set: str = "") -> None:
    """Statistics as LeRobot stored them before 0.4, of one or of several data sets."""
    parts = {"observation.state": ["normalize_inputs"], "action": ["normalize_targets", "unnormalize_outputs"]}
    tensors = load_file(folder / "model.safetensors")
    for key, places in parts.items():
        for place in places:
            for stat, tensor in STATS[key].items():
                tensors[f"{place}.{data_set}buffer_{key.replace('.', '_')}.{stat}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")


def section(folder: Path, **changes: Any) -> Model:
    return Model(type="smolvla", path=str(folder), tokenizer="bytes", num_action_chunks=4, **changes)


def loaded(folder: Path, spaces: EnvSpaces, **changes: Any) -> FlowPolicy:
    policy = vlas.build(section(folder, **changes), spaces, ActionLevels(4, 6), 1, ["go", "come"])
    assert isinstance(policy, FlowPolicy)
    return policy


def golden_policy(folder: Path, spaces: EnvSpaces) -> FlowPolicy:
    """The policy of the folder, with the tokens of the goldens."""
    model = section(folder)
    config = vlas.network_config(model, spaces, ActionLevels(4, 6), 259)
    scales = vlas._scales(model, spaces, False)
    return vlas._assembled(model, spaces, ActionLevels(4, 6), vlas._read(str(folder), config), TOLD, *scales)


@pytest.mark.parametrize("case", CASES)
def test_velocities_are_those_of_lerobot(case: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, case)
    network = vlas._read(str(folder), LeRobotFolder(str(folder)).config())
    assert torch.equal(noise(), torch.tensor(GOLDENS["noise"]))
    words, tasks = Instructions(TOLD, network.get_input_embeddings()), torch.tensor(TASKS)
    numbers = torch.nn.functional.pad(state(), (0, 8 - NUMBERS))
    prefix = network.prefix(words, tasks, network.images(images(), SHAPE), numbers)
    velocity = network.action_out_proj(network.expert(noise(), torch.tensor([1.0, 0.7, 0.25]), prefix))
    expected = torch.tensor(GOLDENS[case]["velocity"])
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(velocity, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seen", ["images", "states"])
def test_it_samples_the_actions_of_lerobot(case: str, seen: str, tmp_path: Path) -> None:
    policy = golden_policy(folder_of(tmp_path, case), IMAGES if seen == "images" else STATES)
    observations = images() if seen == "images" else state()
    generator = torch.Generator().manual_seed(5)
    rows, _ = policy.act(observations, generator, deterministic=True, tasks=torch.tensor(TASKS))
    expected = torch.tensor(GOLDENS[case][f"from {seen}"])
    assert (expected - noise()).abs().max() > 0.3
    torch.testing.assert_close(policy.executed(rows), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("store", [with_processors, with_buffers])
def test_statistics_of_the_folder_scale_states_and_actions(store, tmp_path: Path) -> None:
    plain = loaded(folder_of(tmp_path), STATES)
    store(tmp_path)
    scaled = loaded(tmp_path, STATES)
    mean, std = STATS["observation.state"].values()
    tasks, generators = torch.tensor(TASKS), (torch.Generator().manual_seed(5) for _ in range(2))
    expected = plain.act((state() - mean) / (std + 1e-8), next(generators), deterministic=True, tasks=tasks)[0]
    rows = scaled.act(state(), next(generators), deterministic=True, tasks=tasks)[0]
    torch.testing.assert_close(rows, expected)
    mean, std = STATS["action"].values()
    torch.testing.assert_close(scaled.executed(rows), mean + std * plain.executed(expected))


@pytest.mark.parametrize(
    ("mode", "names", "center", "scale"),
    [("MIN_MAX", ("min", "max"), 3.0, 2.0), ("QUANTILES", ("q01", "q99"), 3.0, 2.0)],
)
def test_ranges_are_scaled_to_one(
    mode: str, names: tuple[str, str], center: float, scale: float, tmp_path: Path
) -> None:
    folder_of(tmp_path, normalization_mapping={"STATE": mode, "ACTION": "IDENTITY"})
    with_processors(tmp_path)
    ends = {f"observation.state.{name}": torch.full((5,), value) for name, value in zip(names, (1.0, 5.0), strict=True)}
    save_file(ends, tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    folder = LeRobotFolder(str(tmp_path))
    assert folder.statistics("observation.state", 5, None) == ([center] * 5, [scale] * 5)
    assert folder.statistics("action", 6, None) is None


def test_an_older_folder_has_statistics_of_several_data_sets(tmp_path: Path) -> None:
    folder_of(tmp_path)
    with_buffers(tmp_path, "so100-blue_")
    with_buffers(tmp_path, "so100_")
    with pytest.raises(ConfigError, match="allowed: so100, so100-blue"):
        loaded(tmp_path, STATES)
    assert loaded(tmp_path, STATES, unnorm_key="so100-blue").state_scale.center.tolist() == [0, 1, 2, 3, 4]


def test_a_folder_goes_in_and_out_without_a_change(tmp_path: Path) -> None:
    """Tensors that the policy does not read, other types and names of a compiled model are kept."""
    folder = folder_of(tmp_path / "in")
    with_processors(folder)
    tensors = load_file(folder / "model.safetensors")
    head = "model.vlm_with_expert.vlm.lm_head.weight"
    assert head in tensors
    tensors = {name: each.bfloat16() if ".vlm." in name else each for name, each in tensors.items()}
    compiled = {name.replace("model.", "model._orig_mod.", 1): each for name, each in tensors.items()}
    save_file(compiled, folder / "model.safetensors")
    (folder / "README.md").write_text("hello")
    policy, out = loaded(folder, STATES), tmp_path / "out"
    out.mkdir()
    weights = policy.network.state_dict()
    weights["state_proj.bias"] += 1
    LeRobotFolder(str(folder)).write(weights, out)
    written, read = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    assert written.keys() == read.keys()
    changed = [name for name in read if not torch.equal(written[name], read[name])]
    assert changed == ["model._orig_mod.state_proj.bias"]
    assert all(written[name].dtype == read[name].dtype for name in read)
    others = {file.name for file in folder.iterdir() if file.is_file()} - {"model.safetensors"}
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in others)
    assert {file.name for file in out.iterdir()} == others | {"model.safetensors"}
    with pytest.raises(DataError, match="of another model"):
        LeRobotFolder(str(folder)).write({"state_proj.bias": torch.zeros(3)}, out)


def changed_tensors(change: dict[str, Tensor | None]) -> Any:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | change
        save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")

    return write


def edited(name: str, **changes: object) -> Any:
    def write(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return write


PROJECTION = "model.state_proj.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "contains no model.safetensors"),
    "damaged weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors"),
    "a tensor too few": (changed_tensors({PROJECTION: None}), f"1 tensors are missing, as {PROJECTION}"),
    "a tensor too many": (changed_tensors({"model.extra.weight": torch.zeros(2)}), "no tensor model.extra.weight"),
    "a wrong shape": (changed_tensors({PROJECTION: torch.zeros(2, 3)}), r"state_proj.weight is torch.float32 \[2, 3\]"),
    "whole numbers": (changed_tensors({PROJECTION: torch.zeros(32, 8, dtype=torch.int64)}), "torch.int64"),
    "not finite": (changed_tensors({PROJECTION: torch.full((32, 8), torch.nan)}), "not finite"),
    "another policy": (edited("config.json", type="act"), "a policy of type act, not smolvla"),
    "image tokens": (edited("config.json", add_image_special_tokens=True), "add_image_special_tokens: True"),
    "fewer experts": (edited("config.json", num_expert_layers=2), "num_expert_layers: 2"),
    "another mode": (edited("config.json", normalization_mapping={"STATE": "LOG"}), "by LOG"),
    "normalised images": (
        edited("config.json", normalization_mapping={"VISUAL": "MEAN_STD"}),
        "normalises images by MEAN_STD",
    ),
    "images as they are": (edited("config.json", resize_imgs_with_padding=None), "resize_imgs_with_padding: null"),
    "no such base": (edited("config.json", vlm_model_name="./nowhere"), "vision-language model ./nowhere"),
    "another base": (edited("vlm/config.json", model_type="idefics3"), "of type idefics3"),
    "short chunks": (edited("config.json", chunk_size=3), "at most 3 actions in a chunk"),
    "small states": (edited("config.json", max_state_dim=4), "at most 4 numbers in an observation"),
    "long instruction": (edited("config.json", tokenizer_max_length=3), "3 tokens"),
    "no statistics": (
        lambda folder: next(folder.glob("*_normalizer_processor.safetensors")).unlink(),
        "names policy_preprocessor_step_5_normalizer_processor.safetensors, which is missing",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_refused(name: str, tmp_path: Path) -> None:
    with_processors(folder_of(tmp_path))
    change, message = WRONG[name]
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, STATES)


def test_statistics_of_another_robot_are_refused(tmp_path: Path) -> None:
    with_processors(folder_of(tmp_path))
    wider = EnvSpaces((7,), ACTIONS, (6,), *BOUNDS)
    with pytest.raises(ConfigError, match="have 5 numbers, and the environment has 7"):
        loaded(tmp_path, wider)
    with pytest.raises(ConfigError, match="no statistics of action of this data set"):
        loaded(tmp_path, STATES, unnorm_key="other")
