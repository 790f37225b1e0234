"""States and actions are scaled as LeRobot's processors scale them; folders that LeRobot cannot load are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_folders import IMAGES, NORMALIZER, STATES, STATS, folder_of, loaded, section, with_buffers, with_processors
from safetensors.torch import load_file, save_file
from smolvla_goldens import TASKS, state
from torch import Tensor

from rl_platform.config.schema.models import Model, RandomLM
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ConfigError
from rl_platform.launch.start_checks.policy_fit import policy_problems
from rl_platform.models.vlas.build import scales
from rl_platform.models.vlas.inputs import ActionRange, StateScale

WIDE = replace(STATES, action_low=(-2.0,) * 6, action_high=(2.0, 2.0, 2.0, 2.0, 2.0, math.inf))
KINDS = ("MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10")
BOTH = {"STATE": "IDENTITY", "ACTION": "IDENTITY"}
X = torch.linspace(-3, 3, 30)


def states(folder: Path) -> StateScale:
    found = scales(section(folder), STATES)[1]
    assert found is not None
    return found


def actions(folder: Path, spaces: EnvSpaces = WIDE) -> ActionRange:
    return scales(section(folder), spaces)[0]


def all_statistics(size: int) -> dict[str, Tensor]:
    """Returns random statistics of a data set in which the first number is constant."""
    generator = torch.Generator().manual_seed(size)
    names = ("mean", "min", "q01", "q10"), ("std", "max", "q99", "q90")
    low = {name: torch.randn(size, generator=generator) for name in names[0]}
    high = {name: torch.rand(size, generator=generator) + 0.5 for name in names[1]}
    for first, second in zip(*names, strict=True):
        high[second][0] = 0.0
        high[second] += 0 if second == "std" else low[first]
    return low | high


def normalized(x: Tensor, stats: dict[str, Tensor], mode: str, eps: float) -> Tensor:
    if mode == "MEAN_STD":
        return (x - stats["mean"]) / (stats["std"] + eps)
    low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}[mode]
    width = stats[high] - stats[low]
    width[width == 0] = eps
    return 2 * (x - stats[low]) / width - 1


def unnormalized(x: Tensor, stats: dict[str, Tensor], mode: str, eps: float) -> Tensor:
    if mode == "MEAN_STD":
        return x * stats["std"] + stats["mean"]
    low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}[mode]
    width = stats[high] - stats[low]
    width[width == 0] = eps
    return (x + 1) / 2 * width + stats[low]


@pytest.mark.parametrize("eps", [1e-8, 0.25])
@pytest.mark.parametrize("mode", KINDS)
def test_the_processors_modes_and_eps_count(mode: str, eps: float, tmp_path: Path) -> None:
    """config.json has MEAN_STD, but its modes are not read if there are processors."""
    stats = {"observation.state": all_statistics(5), "action": all_statistics(6)}
    with_processors(folder_of(tmp_path), stats, eps=eps, norm_map={"STATE": mode, "ACTION": mode})
    expected = normalized(X.view(-1, 5), stats["observation.state"], mode, eps)
    torch.testing.assert_close(states(tmp_path)(X.view(-1, 5)), expected, rtol=1e-4, atol=1e-4)
    expected = unnormalized(X.view(-1, 6), stats["action"], mode, eps)
    torch.testing.assert_close(actions(tmp_path)(X.view(-1, 6)), expected)


def test_a_state_that_is_the_same_in_the_whole_data_set_reads_as_in_lerobot(tmp_path: Path) -> None:
    """Its middle, 1 + eps / 2, is 1 in float32."""
    constant = {"min": torch.ones(5), "max": torch.ones(5)}
    stats = {"observation.state": constant, "action": all_statistics(6)}
    with_processors(folder_of(tmp_path), stats, norm_map={"STATE": "MIN_MAX", "ACTION": "MIN_MAX"})
    assert states(tmp_path)(torch.ones(2, 5)).tolist() == [[-1.0] * 5] * 2


@pytest.mark.parametrize("store", [with_processors, with_buffers])
def test_statistics_of_the_folder_scale_states_and_actions(store: Callable, tmp_path: Path) -> None:
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


def images_only(folder: Path) -> None:
    """Stores statistics of images alone."""
    with_processors(folder, {"observation.image": {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)}})


IDENTITY: dict[str, Callable[[Path], object]] = {
    "no statistics": lambda folder: None,
    "processors without statistics": lambda folder: with_processors(folder, {}),
    "of images only": images_only,
    "modes of the processors": lambda folder: with_processors(folder, norm_map=BOTH),
    "no mode": lambda folder: with_processors(folder, norm_map={}),
    "statistics in the weights are not LeRobot's": lambda folder: with_buffers(with_processors(folder, {})),
    "no mode in config.json": lambda folder: with_buffers(folder_of(folder, normalization_mapping={})),
    "modes of config.json": lambda folder: with_buffers(folder_of(folder, normalization_mapping=BOTH)),
    "no normaliser": lambda folder: [
        (folder / f"policy_{name}processor.json").write_text('{"steps": []}') for name in ("pre", "post")
    ],
}


@pytest.mark.parametrize("case", IDENTITY)
def test_without_normalisation_the_network_writes_the_actions_of_the_environment(case: str, tmp_path: Path) -> None:
    """The environment's bounds have no effect."""
    IDENTITY[case](folder_of(tmp_path))
    torch.testing.assert_close(actions(tmp_path)(X.view(-1, 6)), X.view(-1, 6))
    assert torch.equal(states(tmp_path)(X.view(-1, 5)), X.view(-1, 5))


@pytest.mark.parametrize("options", [{"features": {}}, {"normalize_observation_keys": ["observation.image"]}])
def test_a_state_that_the_step_does_not_list_stays_as_it_is(options: dict[str, Any], tmp_path: Path) -> None:
    with_processors(folder_of(tmp_path), **options)
    assert torch.equal(states(tmp_path)(X.view(-1, 5)), X.view(-1, 5))
    assert actions(tmp_path).low.tolist() == (STATS["action"]["mean"] - STATS["action"]["std"]).tolist()


@pytest.mark.parametrize("absent", ["eps", "normalization_mapping"])
def test_defaults_are_those_of_lerobot(absent: str, tmp_path: Path) -> None:
    if absent == "eps":
        with_processors(folder_of(tmp_path), eps=None)
    else:
        with_buffers(folder_of(tmp_path, normalization_mapping=None))
    mean, std = STATS["observation.state"].values()
    assert torch.equal(states(tmp_path).center, mean)
    assert torch.equal(states(tmp_path).scale, std + 1e-8)


def test_an_older_folder_has_statistics_of_several_data_sets(tmp_path: Path) -> None:
    folder_of(tmp_path)
    with_buffers(tmp_path, "so100-blue_")
    with_buffers(tmp_path, "so100_")
    with pytest.raises(ConfigError, match="allowed: so100, so100-blue"):
        loaded(tmp_path, STATES)
    assert loaded(tmp_path, STATES, unnorm_key="so100-blue").state_scale.center.tolist() == [0, 1, 2, 3, 4]
    with torch.device("meta"):  # as before a run, where its parameters are counted
        assert loaded(tmp_path, STATES, unnorm_key="so100-blue").network.state_proj.weight.is_meta


def test_unbounded_actions_need_no_bounds(tmp_path: Path) -> None:
    folder = with_processors(folder_of(tmp_path))
    assert policy_problems(section(folder), WIDE) == []
    assert loaded(folder, WIDE).action_range.high.isfinite().all()
    random = Model(type="smolvla", random_init=RandomLM())  # as in a rehearsal
    assert policy_problems(random, WIDE) == []
    assert scales(random, WIDE)[0].high.tolist() == [2.0] * 5 + [1.0]
    (told,) = policy_problems(section(folder, train_vision=False), WIDE)
    assert (told.key, "observes no images" in told.message) == ("actor.model.train_vision", True)
    told = policy_problems(section(folder, type="pi0"), WIDE)
    assert ["placed between their bounds" in problem.message for problem in told] == [True]


def test_statistics_of_another_data_set_are_refused(tmp_path: Path) -> None:
    with_processors(folder_of(tmp_path))
    with pytest.raises(ConfigError, match="no statistics of action of this data set"):
        loaded(tmp_path, STATES, unnorm_key="other")


def file_of(folder: Path, kind: str) -> Path:
    return next(folder.glob(f"policy_{kind}processor_*.safetensors"))


def tensors(kind: str, **changes: Tensor | None) -> Callable[[Path], object]:
    """Replaces statistics of the action, or of the state."""

    def write(folder: Path) -> None:
        feature = "action" if kind == "post" else "observation.state"
        given = load_file(file_of(folder, kind)) | {f"{feature}.{name}": each for name, each in changes.items()}
        save_file({name: each for name, each in given.items() if each is not None}, file_of(folder, kind))

    return write


def options(**changes: object) -> Callable[[Path], object]:
    return lambda folder: with_processors(folder, **changes)


def steps(*names: str) -> Callable[[Path], object]:
    """Names the steps of the postprocessor; each has the options of the normaliser."""

    def write(folder: Path) -> None:
        file = folder / "policy_postprocessor.json"
        last = json.loads(file.read_text())["steps"][-1]
        file.write_text(json.dumps({"steps": [last | {"registry_name": name} for name in names]}))

    return write


QUANTILES = {"STATE": "MEAN_STD", "ACTION": "QUANTILES"}
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (
        lambda folder: file_of(folder, "pre").unlink(),
        "names policy_preprocessor_step_5_.*, which is missing",
    ),
    "a damaged file": (
        lambda folder: file_of(folder, "post").write_bytes(b"x" * 40),
        "unnormalizer_processor.safetensors:",
    ),
    "damaged JSON": (lambda folder: (folder / "policy_preprocessor.json").write_text("{"), "policy_preprocessor.json"),
    "a list": (lambda folder: (folder / "policy_preprocessor.json").write_text("[]"), "instead of a JSON object"),
    "no steps": (lambda folder: (folder / "policy_preprocessor.json").write_text("{}"), "'steps'"),
    "one of two": (lambda folder: (folder / "policy_postprocessor.json").unlink(), "has policy_preprocessor.json only"),
    "not finite": (tensors("post", std=torch.full((6,), torch.inf)), "statistics of action are not finite"),
    "NaN": (tensors("pre", mean=torch.full((5,), torch.nan)), "statistics of observation.state are not finite"),
    "no q99": (
        options(norm_map=QUANTILES, stats=STATS | {"action": {"q01": torch.zeros(6)}}),
        "lack q99, which QUANTILES",
    ),
    "no quantiles": (options(norm_map=QUANTILES), "lack q01 and q99, which QUANTILES needs"),
    "another robot": (
        tensors("post", std=torch.ones(7)),
        r"have std of shape \[7\], and the environment needs \[6\]",
    ),
    "a matrix": (tensors("post", mean=torch.ones(2, 3)), r"have mean of shape \[2, 3\]"),
    "one number": (tensors("pre", mean=torch.zeros(1)), r"observation.state have mean of shape \[1\]"),
    "no spread": (
        options(eps=0, stats=STATS | {"observation.state": {"mean": torch.zeros(5), "std": torch.zeros(5)}}),
        "spread of 0, and eps is 0",
    ),
    "negative eps": (options(eps=-1), "eps is -1"),
    "eps as text": (options(eps="small"), "eps is small"),
    "another mode": (options(norm_map={"ACTION": "LOG"}), "policy_postprocessor.json normalises action by LOG"),
    "a mode as a list": (options(norm_map={"ACTION": ["MEAN_STD"]}), "normalises action by"),
    "modes as a list": (options(norm_map=["MEAN_STD"]), "normalisation cannot be read"),
    "normalised images": (options(norm_map=NORMALIZER["norm_map"] | {"VISUAL": "MEAN_STD"}), "images by MEAN_STD"),
    "no modes": (options(norm_map=None), "unnormalizer_processor lacks norm_map"),
    "no features": (options(features=None), "lacks features"),
    "statistics as options": (options(clip=1), "unnormalizer_processor has clip"),
    "an unknown step": (steps("map_delta_action_to_robot_action", "unnormalizer_processor"), "has the step map_delta"),
    "two normalisers": (
        steps("unnormalizer_processor", "unnormalizer_processor"),
        "has 2 steps unnormalizer_processor",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_processors_are_refused(name: str, tmp_path: Path) -> None:
    with_processors(folder_of(tmp_path))
    change, message = WRONG[name]
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, STATES)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"ACTION": "LOG"}, "config.json normalises action by LOG"),
        ({"VISUAL": "MEAN_STD"}, "config.json normalises images by MEAN_STD"),
        (["MEAN_STD"], "normalisation cannot be read"),
    ],
)
def test_wrong_modes_of_older_folders_are_refused(modes: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(with_buffers(folder_of(tmp_path, normalization_mapping=modes)), IMAGES)
