"""Demonstrations from files: what is refused, discrete actions, normalisation, and the loss."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from rl_platform.components.demonstrations.cloning import LEAST_DEVIATION, demonstration_normalizer
from rl_platform.components.demonstrations.demonstration_files import read_demonstrations
from rl_platform.config.schema.runner import WarmStart
from rl_platform.envs.embodied.adapter import FlatObservations
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces, read_spaces
from rl_platform.errors import ConfigError

h5py = pytest.importorskip("h5py", reason="pip install 'rl-platform[demonstrations]'")
pyarrow = pytest.importorskip("pyarrow", reason="pip install 'rl-platform[demonstrations]'")

BOX = EnvSpaces((3,), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0))
CHOICE = EnvSpaces((3,), ActionSpace("discrete", 4), (), action_start=1)


def hdf5(path: Path, observations: object, actions: object) -> WarmStart:
    with h5py.File(path / "demos.hdf5", "w") as file:
        group = file.create_group("data/demo_0")
        if actions is not None:
            group["actions"] = actions
        if observations is not None:
            group["obs/state"] = observations
    return WarmStart(demonstrations=str(path / "demos.hdf5"))


ONES, STEPS = np.full((5, 3), 1.0), np.full((5, 2), 0.5)


@pytest.mark.parametrize(
    ("observations", "actions", "key", "text"),
    [
        (None, STEPS, "demonstrations", "no obs"),
        (ONES, None, "demonstrations", "no actions"),
        (np.ones((5, 4)), STEPS, "observations", "4 numbers"),
        (ONES, np.ones((5, 3)), "demonstrations", "actions have 3 numbers"),
        (ONES, 2 * STEPS + 0.5, "demonstrations", "number 0 of its actions is between 1.5 and 1.5"),
        (ONES * np.nan, STEPS, "demonstrations", "observations have numbers that are not finite"),
        (ONES[:0], STEPS[:0], "demonstrations", "there are no steps"),
        (
            np.ones((6, 3)),
            STEPS,
            "demonstrations",
            "/data/demo_0 has parts of different lengths: obs/state 6, actions 5",
        ),
        (np.full((5, 3), 1e300), STEPS, "demonstrations", "observations have numbers that are not finite"),
        (np.ones(()), STEPS, "demonstrations", "cannot be read (TypeError"),
    ],
)
def test_refused(tmp_path: Path, observations: object, actions: object, key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(hdf5(tmp_path, observations, actions), BOX)
    (problem,) = caught.value.problems
    assert problem.key == f"runner.warm_start.{key}"
    assert text in str(problem)


def test_files_that_are_no_demonstrations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.hdf5").write_text("no HDF5")
    h5py.File(tmp_path / "empty.hdf5", "w").close()
    (tmp_path / "folder").mkdir()
    for name, text in (("text.hdf5", "cannot be read"), ("empty.hdf5", "no episodes"), ("folder", "cannot be read")):
        with pytest.raises(ConfigError, match=text):
            read_demonstrations(WarmStart(demonstrations=str(tmp_path / name)), BOX)


def test_a_lerobot_folder_that_lacks_files_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    (tmp_path / "meta").mkdir()
    (tmp_path / "data").mkdir()
    features = {"observation.state": {"dtype": "float32", "shape": [3]}}
    info = {"total_episodes": 2, "total_frames": 10, "features": features}
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    table = pyarrow.table({"observation.state": list(ONES), "action": list(STEPS)})
    pyarrow.parquet.write_table(table, tmp_path / "data" / "file-000.parquet")
    settings = WarmStart(demonstrations=str(tmp_path))
    with pytest.raises(ConfigError, match="5 steps are in its 1 files"):
        read_demonstrations(settings, BOX)
    pyarrow.parquet.write_table(table, tmp_path / "data" / "file-001.parquet")
    read = read_demonstrations(settings, BOX)
    assert (read.episodes, read.observations.shape, read.actions.shape) == (2, (10, 3), (10, 2))
    assert (read.observations.dtype, read.actions.dtype) == (np.float32, np.float32)


def test_observations_without_a_name_are_read_and_cannot_be_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        file["data/demo_0/obs"], file["data/demo_0/actions"] = ONES, STEPS
    settings = WarmStart(demonstrations=str(tmp_path / "demos.hdf5"))
    assert read_demonstrations(settings, BOX).observations.shape == (5, 3)
    with pytest.raises(ConfigError, match="it has no observations state"):
        read_demonstrations(settings.model_copy(update={"observations": ["state"]}), BOX)


def test_choices_are_counted_from_the_environments_first_one(tmp_path: Path) -> None:
    read = read_demonstrations(hdf5(tmp_path, ONES, np.array([1, 2, 3, 4, 1])), CHOICE)
    assert read.actions.tolist() == [0, 1, 2, 3, 0]
    for wrong in ([0, 1, 2, 3, 4], [1, 2, 3.5, 4, 1]):
        with pytest.raises(ConfigError, match="the choices of the environment, as whole numbers"):
            read_demonstrations(hdf5(tmp_path, ONES, np.array(wrong)), CHOICE)


def test_episodes_whose_lengths_add_up_do_not_hide_a_shift(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        for number, (observations, actions) in enumerate([(6, 5), (4, 5)]):
            file[f"data/demo_{number}/obs/state"] = np.ones((observations, 3))
            file[f"data/demo_{number}/actions"] = np.zeros((actions, 2))
    with pytest.raises(ConfigError, match="leave out the observation that follows the last action"):
        read_demonstrations(WarmStart(demonstrations=str(tmp_path / "demos.hdf5")), BOX)


def test_a_file_with_groups_in_place_of_numbers_is_refused(tmp_path: Path) -> None:
    for name, parts in {"a": {"obs/state/x": ONES}, "b": {"obs/state": [b"x"] * 5}}.items():
        with h5py.File(tmp_path / name, "w") as file:
            file["data/demo_0/actions"] = STEPS
            for part, numbers in parts.items():
                file[f"data/demo_0/{part}"] = numbers
        with pytest.raises(ConfigError):
            read_demonstrations(WarmStart(demonstrations=str(tmp_path / name)), BOX)
    with h5py.File(tmp_path / "c", "w") as file:
        file["data"] = STEPS
    with pytest.raises(ConfigError, match="cannot be read"):
        read_demonstrations(WarmStart(demonstrations=str(tmp_path / "c")), BOX)


class Seen(gymnasium.Env):
    """Observes a state of two numbers and an image."""

    observation_space = Dict({"rgb": Box(0, 255, (2, 3, 3), np.uint8), "state": Box(-9, 9, (2,), np.float32)})
    action_space = Box(-1, 1, (2,), np.float32)


def test_images_of_a_file_are_read_as_the_environment_shows_them(tmp_path: Path) -> None:
    draw, env = np.random.default_rng(0), FlatObservations(Seen())
    states, images = draw.normal(size=(5, 2)).astype(np.float32), draw.integers(0, 256, (5, 2, 3, 3), np.uint8)
    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        file["data/demo_0/obs/state"], file["data/demo_0/obs/rgb"] = states, images
        file["data/demo_0/obs/fractions"] = images / 255
        file["data/demo_0/actions"] = STEPS
    spaces = read_spaces(env, "Seen")
    settings = WarmStart(demonstrations=str(tmp_path / "demos.hdf5"), observations=["rgb", "state"])
    read = read_demonstrations(settings, spaces).observations
    shown = [env.observation({"rgb": image, "state": state}) for image, state in zip(images, states, strict=True)]
    assert np.array_equal(read, np.stack(shown))
    for wrong in (["state", "rgb"], ["fractions", "state"]):
        with pytest.raises(ConfigError, match="allowed: whole numbers from 0 to 255"):
            read_demonstrations(settings.model_copy(update={"observations": wrong}), spaces)
    normalizer = demonstration_normalizer(spaces, 10.0, read)
    assert np.array_equal(normalizer(read)[:, :18], read[:, :18]), "pixels are not normalised"
    assert np.abs(normalizer(read)[:, 18:].std(0) - 1).max() < 0.01


def test_an_image_alone_is_refused(tmp_path: Path) -> None:
    spaces = EnvSpaces((1, 1, 3), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0), 0, "uint8")
    with pytest.raises(ConfigError, match="observes an image alone"):
        read_demonstrations(hdf5(tmp_path, ONES, STEPS), spaces)


def test_the_normaliser_has_the_moments_of_the_demonstrations_for_good() -> None:
    draw = np.random.default_rng(0)
    observations = draw.normal([0.0, 5.0, 1.0], [1.0, 3.0, 0.0], (1000, 3)).astype(np.float32)
    normalizer = demonstration_normalizer(BOX, 10.0, observations)
    wanted = (observations - observations.mean(0)) / (observations.std(0) + LEAST_DEVIATION)
    assert np.allclose(normalizer(observations), wanted, atol=1e-4)
    before = normalizer.state_dict()
    normalizer.update(100 + observations)
    assert np.array_equal(normalizer.count(observations), normalizer(observations))
    assert normalizer.state_dict() == before
