"""SmolVLA computes LeRobot's numbers, and folders of LeRobot go in and out without a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_folders import GOLDENS, IMAGES, STATES, folder_of, loaded, section, with_processors
from safetensors.torch import load_file, save_file
from smolvla_goldens import CASES, NUMBERS, SHAPE, TASKS, TOLD, images, noise, state
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError, DataError
from rl_platform.models.vlas import build as vlas
from rl_platform.models.vlas.flow_policy import FlowPolicy
from rl_platform.models.vlas.inputs import Instructions, camera_images
from rl_platform.models.vlas.lerobot_folder import LeRobotFolder


def golden_policy(folder: Path, spaces: EnvSpaces) -> FlowPolicy:
    """The policy of the folder, with the tokens of the goldens."""
    model = section(folder)
    config = vlas.network_config(model, spaces, ActionLevels(4, 6), 259)
    network = vlas._read(str(folder), config)
    return vlas._assembled(model, spaces, ActionLevels(4, 6), network, TOLD, *vlas.scales(model, spaces))


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


def feature(name: str, *shape: int, kind: str = "STATE") -> dict[str, object]:
    return {name: {"type": kind, "shape": shape}}


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
    "images as they are": (edited("config.json", resize_imgs_with_padding=None), "resize_imgs_with_padding: null"),
    "no such base": (edited("config.json", vlm_model_name="./nowhere"), "vision-language model ./nowhere"),
    "another base": (edited("vlm/config.json", model_type="idefics3"), "of type idefics3"),
    "no steps": (edited("config.json", num_steps=0), "num_steps: 0"),
    "short chunks": (edited("config.json", chunk_size=3), "at most 3 actions in a chunk"),
    "small states": (edited("config.json", max_state_dim=4), "at most 4 numbers in an observation"),
    "long instruction": (edited("config.json", tokenizer_max_length=3), "env.tasks: .* reads at most 3"),
    "another robot": (edited("config.json", output_features=feature("action", 7)), r"action of shape \[7\]"),
    "another state": (
        edited("config.json", input_features=feature("observation.state", 9)),
        r"observation.state of shape \[9\], and an observation of the environment has 5 numbers",
    ),
    "features as a list": (edited("config.json", output_features=["action"]), "features of config.json cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_refused(name: str, tmp_path: Path) -> None:
    with_processors(folder_of(tmp_path))
    change, message = WRONG[name]
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, STATES)


def test_images_of_cameras_that_the_folder_lacks_are_refused(tmp_path: Path) -> None:
    """An environment may have fewer cameras than the folder, as in LeRobot."""
    one, two, three = (feature(f"observation.images.{place}", 3, 480, 640, kind="VISUAL") for place in range(3))
    loaded(folder_of(tmp_path, input_features=one | two | three), IMAGES)
    with pytest.raises(ConfigError, match="has 1 images, and the environment has 2"):
        loaded(folder_of(tmp_path, input_features=one | feature("observation.state", 9)), IMAGES)


def test_it_writes_options_that_the_run_has_changed(tmp_path: Path) -> None:
    folder, out = folder_of(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    LeRobotFolder(str(folder)).write(loaded(folder, STATES).network.state_dict(), out, num_steps=3, n_action_steps=2)
    given = json.loads((folder / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == given | {"num_steps": 3, "n_action_steps": 2}


def test_a_narrow_image_has_a_column_left() -> None:
    scaled = camera_images(torch.full((2, 600), 255, dtype=torch.uint8), (200, 1, 3), (64, 64), keep_ratio=True)
    assert scaled.shape == (2, 1, 3, 64, 64)
    assert (scaled[..., -1] == 1).all()
    assert (scaled[..., :-1] == -1).all()
