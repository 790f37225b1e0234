"""`load_policy`: it acts as `--eval` does, and it says what is wrong with a folder or an observation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from policies import observations, saved

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Model
from rl_platform.envs.embodied.descriptions import EnvDescription, find_spec
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces, ObservationPart
from rl_platform.errors import ConfigError, DataError
from rl_platform.launch.saved.loaded_policy import Policy, load_policy
from rl_platform.models.embodied_policy import build_policy
from rl_platform.models.saved_policy import DESCRIPTION, WEIGHTS, SavedPolicy

MASKED = "rl_platform.envs.embodied.masked:Masked-v0"
GRU = "{type: gru, hidden_sizes: [16], recurrent_size: 8}"
CHUNKS = "{hidden_sizes: [16], num_action_chunks: 4, action_distribution: squashed}"
EPISODES, ROWS, STEPS = 5, 4, 40
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # environment, its options, keys
    "cartpole": ("CartPole-v1", {}, ()),
    "robot with normaliser": ("Hopper-v5", {}, ()),
    "recurrent": (MASKED, {"env_id": "CartPole-v1", "hide": [1, 3]}, (f"actor.model={GRU}",)),
    "chunks, squashed": ("Pendulum-v1", {}, (f"actor.model={CHUNKS}",)),
}


def returns_by_hand(policy: Policy, make: Callable[[], gymnasium.Env], seed: int, deterministic: bool) -> list[float]:
    """The sums of rewards of EPISODES episodes, at most ROWS at once, as an evaluation has them.

    Environments that have ended keep their last observation; in the last wave some repeat its first seed.
    """
    returns: list[float] = []
    for first in range(seed, seed + EPISODES, ROWS):
        counted = min(ROWS, seed + EPISODES - first)
        envs = [make() for _ in range(ROWS)]
        seeds = [first + index if index < counted else first for index in range(ROWS)]
        observations = np.stack([env.reset(seed=own)[0] for env, own in zip(envs, seeds, strict=True)])
        sums, running = [0.0] * counted, set(range(counted))
        policy.reset()
        while running:
            actions = policy.act(observations, deterministic)
            for index in sorted(running):
                observations[index], reward, terminated, truncated, _ = envs[index].step(actions[index])
                sums[index] += float(reward)
                if terminated or truncated:
                    running.remove(index)
        returns += sums
    return returns


@pytest.mark.parametrize("kind", KINDS)
def test_it_reproduces_an_evaluation_bit_for_bit(command, folder: Path, kind: str) -> None:
    env_id, options, more = KINDS[kind]
    keys = [f"env.id={env_id}", f"env.num_envs={ROWS}", f"env.evaluation.episodes={EPISODES}", *more]
    keys += [f"env.kwargs={json.dumps(options)}", f"env.max_episode_steps={STEPS}"]
    ended = command("embodied.yaml", "runner.max_steps=2", "actor.optim.lr=0.01", *keys)
    assert ended.code == 0, ended.err
    ended = command("--eval", "out", "env.evaluation.video=false")
    assert ended.code == 0, ended.err
    evaluation = json.loads((folder / "out" / "evaluation" / "step-00000002.json").read_text())

    def make() -> gymnasium.Env:
        return gymnasium.make(find_spec(EnvDescription(env_id)), max_episode_steps=STEPS, **options)

    for source in ("out", "out/model"):
        for row in evaluation["rows"]:
            returns = returns_by_hand(load_policy(source), make, evaluation["seed"], row["actions"] == "deterministic")
            assert returns == row["returns"]


def test_memory_and_chunks_belong_to_rows_and_end_with_episodes() -> None:
    for kind in ("memory", "chunks"):
        policy, several = Policy(saved(kind)), observations(kind, 3)
        steps = [policy.act(several) for _ in range(2)]
        assert not np.array_equal(steps[0], steps[1]) or kind == "memory"
        again = policy.act(several, episode_starts=np.array([True, False, True]))
        np.testing.assert_array_equal(again[[0, 2]], steps[0][[0, 2]])
        for index in range(3):  # alone, a row goes through the same
            alone = Policy(saved(kind))
            same = [alone.act(several[index]) for _ in range(2)]
            np.testing.assert_allclose(same, [step[index] for step in steps], rtol=1e-5, atol=1e-6)
        policy.reset()
        np.testing.assert_allclose(policy.act(several[:2]), steps[0][:2], rtol=1e-5, atol=1e-6)


def test_samples_depend_on_the_seed_and_stay_in_the_bounds() -> None:
    rows = observations("torques", 50)
    first, again, other = (Policy(saved("torques"), seed).act(rows, False) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.shape == (50, 2, 1)
    assert np.abs(first[:, 0]).max() == np.float32(0.1)
    choices = Policy(saved("choices")).act(observations("choices", 200), False)
    assert {*choices.tolist()} == {5, 6, 7, 8}  # the space begins at 5


def test_it_changes_nothing_of_the_process() -> None:
    given, threads = saved("images"), torch.get_num_threads()
    state = torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        Policy(given).act(observations("images", 2), False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), state)


OBSERVATIONS = [
    ("choices", np.zeros(4), {}, r"has shape (4,); this policy observes (3,), or (N, 3) for N of them"),
    ("choices", np.zeros((0, 3)), {}, "has shape (0, 3)"),
    ("choices", np.array(["a", "b", "c"]), {}, "has type <U1; this policy observes real numbers"),
    ("choices", [[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]], {}, "row 1 is not finite"),
    ("choices", {"a": 1}, {}, "gymnasium.spaces.flatten(env.observation_space, observation)"),
    ("choices", [[1.0], [1.0, 2.0]], {}, "no array"),
    ("choices", (np.zeros(3), {}), {}, "no array: reset() and step() return it first in a tuple"),
    ("images", np.zeros((12, 12, 3)), {}, "has type float64; this policy observes uint8 images"),
    ("images", np.zeros((3, 12, 12), np.uint8), {}, "has shape (3, 12, 12)"),
    ("memory", np.zeros((2, 3)), {"episode_starts": [1, 0]}, "episode_starts: has type int64 and shape (2,)"),
    ("memory", np.zeros((2, 3)), {"episode_starts": [True]}, "allowed: bool (2,)"),
    ("choices", np.zeros(3), {"tasks": 0}, "reads no instruction"),
    ("instructions", np.zeros((12, 12, 3), np.uint8), {}, "tasks: None; allowed: integers 0..1"),
    ("instructions", np.zeros((12, 12, 3), np.uint8), {"tasks": 2}, "tasks: 2; allowed: integers 0..1"),
]


@pytest.mark.parametrize(("kind", "observation", "more", "message"), OBSERVATIONS)
def test_observations_that_do_not_fit(kind: str, observation: object, more: dict[str, object], message: str) -> None:
    with pytest.raises(DataError) as error:
        Policy(saved(kind)).act(observation, **more)
    assert message in str(error.value)


def test_dict_observations() -> None:
    given, parts = saved("choices"), (ObservationPart("goal", (), 1, True), ObservationPart("hand.at", (2, 1), 2, True))
    described = given.description.model_copy(update={"spaces": replace(given.description.spaces, parts=parts)})
    policy, flat = Policy(replace(given, description=described)), observations("choices", 3)
    rows = {"hand": {"at": flat[:, 1:, None], "more": 0}, "goal": flat[:, 0]}
    row = {"hand": {"at": flat[0, 1:, None]}, "goal": flat[0, 0]}
    np.testing.assert_array_equal(policy.act(rows), Policy(given).act(flat))
    assert policy.act(row) == Policy(given).act(flat[0])
    for wrong, message in (({"goal": 1.0}, "has no part hand.at"), ({**row, "goal": [1, 2]}, "no array")):
        with pytest.raises(DataError, match=message):
            policy.act(wrong)
    image = ObservationPart("hand.at", (2, 1, 1), 2, False, image=True)
    spaces = replace(given.description.spaces, parts=(parts[0], image))
    policy = Policy(replace(given, description=given.description.model_copy(update={"spaces": spaces})))
    for pixels in (np.full((2, 1, 1), 0.5), np.full((2, 1, 1), 300)):
        with pytest.raises(DataError, match=r"part hand\.at has type .*; this policy observes uint8 images"):
            policy.act({"goal": 1.0, "hand": {"at": pixels}})
    spaces = replace(given.description.spaces, parts=(parts[0], ObservationPart("kind", (), 2, False)))
    policy = Policy(replace(given, description=given.description.model_copy(update={"spaces": spaces})))
    with pytest.raises(DataError, match=r"gymnasium\.spaces\.flatten"):
        policy.act({"goal": 1.0, "kind": 1})


KEYED = """
import gymnasium
from gymnasium.spaces import Box, Dict, Tuple

class Keyed(gymnasium.Env):
    observation_space = Dict({"arm.joint": Box(-1, 1, (2,)), "a": Tuple((Dict({"b.c": Box(-1, 1, (1,))}),))})
    action_space = Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}

class Pair(Keyed):
    observation_space = Tuple((Box(-1, 1, (2,)), Dict({"b.c": Box(-1, 1, (1,))})))

class Clash(Keyed):
    observation_space = Dict({"a.b": Box(-1, 1, (2,)), "a": Dict({"b": Box(-1, 1, (1,))})})
"""


def test_keys_with_dots_and_tuples_from_training_to_acting(command, folder: Path, monkeypatch) -> None:
    (folder / "keyed.py").write_text(KEYED)
    monkeypatch.syspath_prepend(folder)
    import keyed

    for name in ("Keyed", "Pair"):
        keys = [f"env.id=keyed:{name}", "env.max_episode_steps=5", f"runner.output_dir={name}", "runner.max_steps=1"]
        ended = command("embodied.yaml", *keys)
        assert ended.code == 0, ended.err
        env, policy = getattr(keyed, name)(), load_policy(name)
        seen, _ = env.reset()
        flat = gymnasium.spaces.flatten(env.observation_space, seen)
        np.testing.assert_array_equal(policy.act(seen), load_policy(name).act(flat))
    with pytest.raises(DataError, match="has no part 1"):
        policy.act((np.zeros(2), {"b": np.zeros(1)}))
    with pytest.raises(DataError, match="has no part 0"):
        policy.act({"b.c": np.zeros(1)})
    ended = command("embodied.yaml", "env.id=keyed:Clash", "env.max_episode_steps=5")
    assert (ended.code, "two parts of the observation space of keyed:Clash have one name" in ended.err) == (2, True)
    assert "value: a.b" in ended.err


def test_a_tensor_with_a_gradient_is_an_observation() -> None:
    rows = observations("choices", 2)
    given = torch.from_numpy(rows).requires_grad_()
    assert np.array_equal(Policy(saved("choices")).act(given), Policy(saved("choices")).act(rows))


def test_another_number_of_rows_during_episodes() -> None:
    policy = Policy(saved("memory"))
    policy.act(observations("memory", 2))
    with pytest.raises(DataError, match=r"3 observations, but episodes of 2 environments are running. Call reset\(\)"):
        policy.act(observations("memory", 3))
    stateless = Policy(saved("choices"))
    assert [len(stateless.act(observations("choices", count))) for count in (2, 3)] == [2, 3]


def test_folders_without_a_policy(command, folder: Path) -> None:
    (folder / "empty").mkdir()
    for name, error, message in (
        ("missing", ConfigError, "load_policy: no such folder"),
        ("embodied.yaml", ConfigError, "is a file, not the folder of a run"),
        ("empty", ConfigError, "contains neither a run nor a checkpoint"),
    ):
        with pytest.raises(error, match=message):
            load_policy(name)
    assert command("embodied.yaml", "runner.max_steps=2", "runner.save_interval=1").code == 0
    for device in ("tpu", "cuda:9", 3):
        with pytest.raises(ConfigError, match=f"no such device: .*\n    value: {device}"):
            load_policy("out", device=device)
    for step, hint in (("1", "\n    hint: step=1"), ("first", ""), (1.0, ""), (True, ""), (-1, ""), ([1], "")):
        with pytest.raises(ConfigError) as wrong:
            load_policy("out", step=step)
        assert f"step: is no step\n    value: {step!r}\n    allowed: a whole number, at least 0; None: " in str(
            wrong.value
        )
        assert str(wrong.value).endswith(f"the newest checkpoint{hint}")
    assert load_policy("out", step=1).saved.description.step == 1
    assert load_policy(folder / "out" / "checkpoints" / "step-00000002", step=1).saved.description.step == 1
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7\n    value: 7\n    allowed: 1, 2\n"):
        load_policy("out", step=7)
    with pytest.raises(ConfigError, match=r"policy of one step\n    value: 1\n    allowed: 2\n"):
        load_policy("out/model", step=1)
    shutil.rmtree("out/checkpoints")
    with pytest.raises(ConfigError, match="the checkpoints of this run were deleted"):
        load_policy("out")
    assert load_policy("out/model").saved.description.step == 2
    assert command("reasoning.yaml", "runner.max_steps=1", "runner.output_dir=words").code == 0
    with pytest.raises(ConfigError, match=r"only embodied policies act\n.*\n.*rl-platform export .*words"):
        load_policy("words")


def test_a_policy_from_a_file_acts_to_the_bit_as_the_one_that_was_written(tmp_path: Path) -> None:
    """Products of matrices may round differently where the numbers do not begin at a multiple of 64 bytes."""
    spaces = EnvSpaces((5,), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0))
    model = Model(type="gru", hidden_sizes=[9], recurrent_size=7, action_distribution="squashed")
    levels = ActionLevels(1, 2)
    changes = {"spaces": spaces, "model": model, "levels": levels, "normalizer": None}
    about = saved("memory").description.model_copy(update=changes)
    torch.manual_seed(0)
    weights = {
        name: torch.randn(tensor.shape) for name, tensor in build_policy(model, spaces, levels, 0).state_dict().items()
    }
    SavedPolicy(about, weights).write(tmp_path)
    written, read = Policy(SavedPolicy(about, weights)), load_policy(tmp_path)
    seen = np.random.default_rng(0).normal(size=(100, 5)).astype(np.float32)
    for observation in seen:
        np.testing.assert_array_equal(read.act(observation), written.act(observation))


def test_damaged_files_of_a_policy(tmp_path: Path) -> None:
    saved("choices").write(tmp_path)
    good = (tmp_path / DESCRIPTION).read_text()
    for text, message in (
        ("{", "Invalid JSON"),
        (good.replace('"format": 1', '"format": 2'), "format: Input should be 1"),
        (good.replace('"seed"', '"sead"'), "seed: Field required"),
        (good.replace('"clip": 2.0', '"clip": "wide"'), "normalizer.clip: Input should be a valid number"),
        (good.replace('"size": 4', '"size": 5'), r"policy\.safetensors does not fit policy\.json: .*policy_head"),
    ):
        (tmp_path / DESCRIPTION).write_text(text)
        with pytest.raises(DataError, match=message):
            load_policy(tmp_path)
    (tmp_path / DESCRIPTION).write_text(good)
    (tmp_path / WEIGHTS).write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        load_policy(tmp_path)
